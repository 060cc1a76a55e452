"""settings: settings come from the command line, then from the environment, and a mistake is named."""

import os
from pathlib import Path

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.core.settings import read_settings, variable_name
from neuronpipe.gateway.settings import GatewaySettings
from neuronpipe.local.settings import AllSettings
from neuronpipe.neuron_executor.settings import NeuronExecutorSettings
from neuronpipe.postprocessor.settings import PostprocessorSettings
from neuronpipe.process.settings import ServerSettings
from neuronpipe.tokenizer.settings import TokenizerSettings

_REPOSITORY = {"repository": "/models"}
_KINDS: list[type[ServerSettings]] = [AllSettings, GatewaySettings, NeuronExecutorSettings, PostprocessorSettings, TokenizerSettings]

each_service = pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("NEURONPIPE_"):
            monkeypatch.delenv(name)


def test_the_environment_wins_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_NEURON_EXECUTOR_MAX_BATCH_SIZE", "7")
    assert read_settings(NeuronExecutorSettings, _REPOSITORY).max_batch_size == 7


def test_the_command_line_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_NEURON_EXECUTOR_MAX_BATCH_SIZE", "7")
    assert read_settings(NeuronExecutorSettings, _REPOSITORY | {"max_batch_size": "9"}).max_batch_size == 9


def test_a_required_setting_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_TOKENIZER_REPOSITORY", "/models")
    assert read_settings(TokenizerSettings, {}).repository == Path("/models")


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_GATEWAY_MAX_BATCH_ITEMS", "")
    assert read_settings(GatewaySettings, _REPOSITORY).max_batch_items == 256


@each_service
def test_an_unknown_variable_under_the_prefix_is_an_error_that_names_it(
    kind: type[ServerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    misspelt = variable_name(kind, "repositry")
    monkeypatch.setenv(misspelt, "/models")
    with pytest.raises(SetupError, match=f"{misspelt}: no such setting; there are .*{variable_name(kind, 'repository')}"):
        read_settings(kind, _REPOSITORY)


def test_variables_of_other_services_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_TOKENIZER_LISTEN", "127.0.0.1:1")
    assert read_settings(GatewaySettings, _REPOSITORY).listen == "127.0.0.1:50050"


@each_service
def test_a_missing_setting_is_named_by_its_variable(kind: type[ServerSettings]) -> None:
    with pytest.raises(SetupError, match=f"^{variable_name(kind, 'repository')}: Field required$"):
        read_settings(kind, {})


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(SetupError, match=r"NEURONPIPE_GATEWAY_MAX_BATCH_ITEMS: .*; NEURONPIPE_GATEWAY_REPOSITORY: "):
        read_settings(GatewaySettings, {"max_batch_items": "0"})


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        (AllSettings, "grace_s", "-1"),
        (AllSettings, "grace_s", "soon"),
        (AllSettings, "max_message_bytes", "1023"),
        (AllSettings, "max_message_bytes", str(2**31)),
        (AllSettings, "max_receiving_bytes", "1023"),
        (AllSettings, "max_connection_age_s", "-1"),
        (AllSettings, "max_connection_age_s", "604801"),
        (AllSettings, "max_connection_age_grace_s", "-1"),
        (AllSettings, "max_connection_age_grace_s", "604801"),
        (AllSettings, "listen", "50050"),
        (AllSettings, "listen", "localhost:"),
        (AllSettings, "listen", "localhost:http"),
        (AllSettings, "listen", "localhost:65536"),
        (AllSettings, "max_requests_in_flight", "0"),
        (AllSettings, "max_tokens_in_flight", "0"),
        (AllSettings, "max_input_bytes", "0"),
        (AllSettings, "max_batch_items", "0"),
        (AllSettings, "max_stream_in_flight", "0"),
        (AllSettings, "cores", "-1"),
        (AllSettings, "cores", "257"),
        (AllSettings, "threads", "-1"),
        (AllSettings, "max_batch_size", "0"),
        (AllSettings, "max_batch_size", "4097"),
        (AllSettings, "max_batch_tokens", "0"),
        (AllSettings, "max_queue_sequences", "0"),
        (AllSettings, "max_queue_sequences", "1.5"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_variables_name(kind: type[ServerSettings], setting: str, value: str) -> None:
    with pytest.raises(SetupError, match=f"^{variable_name(kind, setting)}: "):
        read_settings(kind, _REPOSITORY | {setting: value})


@each_service
def test_every_setting_explains_itself(kind: type[ServerSettings]) -> None:
    assert [name for name, field in kind.model_fields.items() if not field.description] == []


def test_every_service_has_a_prefix_of_its_own() -> None:
    prefixes = [str(kind.model_config.get("env_prefix")) for kind in _KINDS]
    assert not any(one != other and one.startswith(other) for one in prefixes for other in prefixes)
    assert len(set(prefixes)) == len(prefixes)


def test_every_service_listens_on_a_port_of_its_own() -> None:
    # `all` takes the gateway's place, so it has the gateway's port.
    ports = {kind: kind.model_fields["listen"].default for kind in _KINDS if kind is not AllSettings}
    assert len(set(ports.values())) == len(ports)


def test_settings_cannot_be_changed_once_read() -> None:
    settings = read_settings(GatewaySettings, _REPOSITORY)
    with pytest.raises(ValueError, match="frozen"):
        settings.max_batch_items = 1  # type: ignore[misc]


@pytest.mark.parametrize("kind", [AllSettings, GatewaySettings], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("address", ["127.0.0.1", "8080", "127.0.0.1:65536", "127.0.0.1:http"])
def test_an_address_for_http_that_is_none_is_an_error(kind: type[ServerSettings], address: str) -> None:
    with pytest.raises(SetupError, match=f"^{variable_name(kind, 'http_listen')}: "):
        read_settings(kind, _REPOSITORY | {"http_listen": address})
