"""settings: settings come from the command line, then from the environment, and a mistake is named."""

import json
from math import inf

import pytest
from pydantic.fields import FieldInfo

from neuronpipe.bulk.transform.near_engine import TransformSettings
from neuronpipe.cli import make_parser
from neuronpipe.cli.serve import settings_parser
from neuronpipe.core.errors import SetupError
from neuronpipe.core.removed_settings import REMOVED
from neuronpipe.core.settings import (
    declared_in,
    fields_of,
    option_name,
    read_options,
    read_settings,
    values_of,
    variable_name,
)
from neuronpipe.core.units import unit_of
from neuronpipe.measure.acceptance_process import AcceptSettings
from neuronpipe.platform.cache.settings import RedisSettings
from neuronpipe.platform.process.settings import ServerSettings
from neuronpipe.serve.fronts import front_settings
from neuronpipe.serve.settings import AllSettings, PipelineProcessSettings
from neuronpipe.stages.settings import EngineSettings, NeuronExecutorSettings, PostprocessorSettings, TokenizerSettings

_REPOSITORY = {"repository": "/models"}
_KINDS: list[type[ServerSettings]] = [AllSettings, PipelineProcessSettings, NeuronExecutorSettings]
_KINDS += [PostprocessorSettings, TokenizerSettings]

pytestmark = pytest.mark.usefixtures("no_settings_from_outside")
each_service = pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)


@pytest.mark.parametrize(("given", "size"), [({}, 7), ({"max_batch_size": "9"}, 9)], ids=["default", "command line"])
def test_the_environment_wins_over_the_default_and_the_command_line_over_both(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], size: int
) -> None:
    monkeypatch.setenv("NEURONPIPE_NEURON_EXECUTOR_MAX_BATCH_SIZE", "7")
    assert read_settings(NeuronExecutorSettings, _REPOSITORY | given).executor.max_batch_size == size


def test_a_required_setting_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_TOKENIZER_REPOSITORY", "/models")
    assert read_settings(TokenizerSettings, {}).models.repository == "/models"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("listen", "--listen: must be of this form: address to listen on: HOST:PORT, "),
        ("metrics_listen", "--metrics-listen: must be of this form: address for the Prometheus endpoint, HOST:PORT; "),
    ],
)
def test_a_value_of_another_form_is_told_the_form(setting: str, told: str) -> None:
    with pytest.raises(SetupError) as caught:
        read_settings(TokenizerSettings, _REPOSITORY | {setting: "50051"})
    assert str(caught.value).startswith(told)


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_GATEWAY_MAX_IMAGE_BYTES", "")
    assert read_settings(PipelineProcessSettings, _REPOSITORY).gateway.pipeline.max_image_bytes == 10 << 20


@each_service
def test_an_unknown_variable_under_the_prefix_is_an_error_that_names_it(
    kind: type[ServerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    misspelt = variable_name(kind, "repositry")
    monkeypatch.setenv(misspelt, "/models")
    problem = f"{misspelt}: no such setting; did you mean .*{variable_name(kind, 'repository')}\\b.*--help-all"
    with pytest.raises(SetupError, match=problem):
        read_settings(kind, _REPOSITORY)


def test_variables_of_other_services_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_TOKENIZER_LISTEN", "127.0.0.1:1")
    assert read_settings(PipelineProcessSettings, _REPOSITORY).process.listen == "127.0.0.1:50050"


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_is_refused_with_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = f"was removed: {REMOVED[name]}"
    with pytest.raises(SystemExit):
        settings_parser("all").parse_args(["--repository", "/models", f"{option_name(name)}=1"])
    assert capsys.readouterr().err.endswith(f" error: {option_name(name)} {reason}\n")
    variable = variable_name(AllSettings, name)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SetupError) as refused:
        read_settings(AllSettings, _REPOSITORY)
    assert str(refused.value) == f"{variable} {reason}"


@each_service
def test_a_setting_is_in_one_part_of_a_service(kind: type[ServerSettings]) -> None:
    names = [name for _, name, _ in declared_in(kind)]
    assert sorted(set(names)) == sorted(names)


@each_service
def test_no_setting_has_a_name_that_was_removed(kind: type[ServerSettings]) -> None:
    assert REMOVED.keys() & fields_of(kind).keys() == set()


def test_serve_all_has_at_most_80_settings() -> None:
    """A value that nobody would change is a constant."""
    settings = len(fields_of(AllSettings))
    assert settings <= 80, "make another setting a constant, with its reason in core/removed_settings.py"


@each_service
def test_a_missing_setting_is_named_by_its_variable(kind: type[ServerSettings]) -> None:
    with pytest.raises(SetupError, match=f"^{variable_name(kind, 'repository')}: Field required$"):
        read_settings(kind, {})


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(SetupError, match=r"--max-image-bytes: .*; NEURONPIPE_GATEWAY_REPOSITORY: "):
        read_settings(PipelineProcessSettings, {"max_image_bytes": "0"})


def test_a_variable_out_of_bounds_is_refused_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_GATEWAY_MAX_IMAGE_BYTES", "0")
    with pytest.raises(SetupError, match=r"^NEURONPIPE_GATEWAY_MAX_IMAGE_BYTES: "):
        read_settings(PipelineProcessSettings, _REPOSITORY)


_OUT_OF_BOUNDS = {
    "grace_s": ("-1", "soon"),
    "max_receiving_bytes": ("1023",),
    "max_connection_age_s": ("-1", "604801"),
    "listen": ("50050", "localhost:", "localhost:http", "localhost:65536", "unix:relative.sock", f"unix:/{'x' * 107}"),
    "executor_target": (f"127.0.0.1:1,unix:/{'x' * 107}", "local,127.0.0.1:50052"),
    "max_requests_in_flight": ("0",),
    "max_tokens_in_flight": ("0",),
    "max_input_bytes": ("0",),
    "max_image_bytes": ("0",),
    "model_aliases": ("a", "a=b,a=c", "a=b,b=c"),
    "http_path_prefix": ("prefix", "/prefix/"),
    "cores": ("-1", "257"),
    "threads": ("-1",),
    "max_batch_size": ("0", "4097"),
    "max_batch_tokens": ("0", "1.5"),
}


@pytest.mark.parametrize(
    ("setting", "value"), [(name, value) for name in _OUT_OF_BOUNDS for value in _OUT_OF_BOUNDS[name]]
)
def test_a_value_out_of_bounds_is_refused_by_the_name_of_its_option(setting: str, value: str) -> None:
    with pytest.raises(SetupError, match=f"^{option_name(setting)}: "):
        read_settings(AllSettings, _REPOSITORY | {setting: value})


_TARGETS = ("tokenizer_target", "executor_target")
_LARGE = {"s": ("90000ms", 90), "ms": ("1.5s", 1500), "bytes": ("100MiB", 100 << 20)}


def _most(field: FieldInfo) -> float:
    """The largest value of a setting."""
    return min((getattr(bound, "le", inf) for bound in field.metadata), default=inf)


@each_service
def test_every_setting_of_a_time_or_a_size_takes_a_unit(kind: type[ServerSettings]) -> None:
    units = {name: unit_of(name) for name in fields_of(kind) if unit_of(name)}
    assert set(units.values()) >= {"s", "bytes"}
    given = {name: _LARGE[unit][0] for name, unit in units.items() if _LARGE[unit][1] <= _most(fields_of(kind)[name])}
    # A setting of a stage in another process is refused.
    near = {name: "local" for name in fields_of(kind) if name in _TARGETS}
    settings = read_settings(kind, _REPOSITORY | near | given)
    read = values_of(settings)
    assert {name: read[name] for name in given} == {name: _LARGE[units[name]][1] for name in given}


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("grace_s", "10MB", "'10MB': must be a number of seconds, or .* a unit, such as 250ms, 30s, 10m or 2h"),
        ("max_receiving_bytes", "1m", "'1m': must be a number of bytes, or .* a unit, such as 256MiB or 1.5GB"),
        ("jobs_retention_s", "1500ms", "valid integer"),
        ("grace_s", "2h", "less than or equal to 3600"),
    ],
)
def test_a_wrong_unit_is_named_with_the_right_ones(setting: str, value: str, problem: str) -> None:
    with pytest.raises(SetupError, match=f"^{option_name(setting)}: .*{problem}"):
        read_settings(AllSettings, _REPOSITORY | {setting: value})


@each_service
def test_every_setting_explains_itself(kind: type[ServerSettings]) -> None:
    assert [name for name, field in fields_of(kind).items() if not field.description] == []


def test_every_service_has_a_prefix_of_its_own() -> None:
    prefixes = [kind.prefix for kind in _KINDS]
    assert not any(prefix != other and prefix.startswith(other) for prefix in prefixes for other in prefixes)
    assert len(set(prefixes)) == len(prefixes)


def test_every_service_listens_on_a_port_of_its_own() -> None:
    # `all` takes the gateway's place, so it has the gateway's port.
    ports = {kind: fields_of(kind)["listen"].default for kind in _KINDS if kind is not AllSettings}
    assert len(set(ports.values())) == len(ports)


def test_settings_cannot_be_changed_once_read() -> None:
    settings = read_settings(PipelineProcessSettings, _REPOSITORY)
    with pytest.raises(ValueError, match="frozen"):
        settings.gateway.pipeline.max_image_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize("kind", [AllSettings, PipelineProcessSettings], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("address", ["127.0.0.1", "8080", "127.0.0.1:65536", "127.0.0.1:http", "unix:/run/http.sock"])
def test_an_address_for_http_that_is_none_is_an_error(kind: type[ServerSettings], address: str) -> None:
    with pytest.raises(SetupError, match=r"^--http-listen: "):
        read_settings(kind, _REPOSITORY | {"http_listen": address})


@each_service
def test_a_service_can_listen_on_a_unix_socket(kind: type[ServerSettings]) -> None:
    assert read_settings(kind, _REPOSITORY | {"listen": "unix:/run/a.sock"}).process.listen == "unix:/run/a.sock"


def test_all_stages_are_near_in_all_and_none_in_a_gateway_unless_told_otherwise() -> None:
    assert read_settings(AllSettings, _REPOSITORY).gateway.far_targets == {}
    assert read_settings(PipelineProcessSettings, _REPOSITORY).gateway.far_targets == {
        "tokenizer": "127.0.0.1:50051",
        "neuron-executor": "127.0.0.1:50052",
        "postprocessor": "127.0.0.1:50053",
    }
    near = {"tokenizer_target": "local", "postprocessor_target": "local", "executor_target": "unix:/run/a.sock"}
    expected = {"neuron-executor": "unix:/run/a.sock"}
    assert read_settings(PipelineProcessSettings, _REPOSITORY | near).gateway.far_targets == expected


@pytest.mark.parametrize(
    ("setting", "value", "target"),
    [
        ("cores", "2", "executor_target"),
        ("max_batch_size", "8", "executor_target"),
        ("token_cache_bytes", "0", "tokenizer_target"),
        ("token_cache_redis", "never", "tokenizer_target"),
    ],
)
def test_a_setting_of_a_stage_in_another_process_is_refused(setting: str, value: str, target: str) -> None:
    given = _REPOSITORY | {setting: value}
    option = f"--{setting.replace('_', '-')}"
    problem = f"{option}: belongs to a stage in another process; .* with --{target[:-7]}-target local"
    with pytest.raises(SetupError, match=problem):
        read_settings(PipelineProcessSettings, given)
    near = read_settings(PipelineProcessSettings, given | {target: "local"})
    assert str(values_of(near)[setting]) == value


def test_settings_that_the_gateway_shares_with_a_far_tokenizer_are_its_own() -> None:
    settings = read_settings(PipelineProcessSettings, _REPOSITORY | {"redis_url": "redis://127.0.0.1:6379/0"})
    assert settings.gateway.far_targets.keys() == {"tokenizer", "neuron-executor", "postprocessor"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"executor_target": "127.0.0.1:50052"}, "they share the executor of this service"),
        ({"listen": "unix:/run/a.sock"}, "a Unix socket belongs to one process"),
    ],
)
def test_front_processes_need_what_they_can_share(given: dict[str, str], problem: str) -> None:
    assert read_settings(AllSettings, _REPOSITORY | given).front_processes == 0
    with pytest.raises(SetupError, match=f"--front-processes: .*{problem}"):
        read_settings(AllSettings, _REPOSITORY | given | {"front_processes": "2"})


def test_a_front_process_gets_all_settings_also_passwords_but_those_of_the_executor() -> None:
    settings = AllSettings.of(**_REPOSITORY, redis_url="redis://:secret@host:6379/0", cores=2, front_processes=2)
    given = json.loads(json.dumps(front_settings(settings, "127.0.0.1:1", "", "unix:/run/executor.sock")))
    front = AllSettings.of(**given)
    assert front.redis == settings.redis
    assert front.executor == EngineSettings()
    assert (front.process.listen, front.gateway.executor_target) == ("127.0.0.1:1", "unix:/run/executor.sock")


def test_a_password_in_a_url_is_not_in_the_repr_of_settings() -> None:
    settings = RedisSettings(redis_url="redis://:secret@host:6379/0")
    assert "secret" not in repr(settings)
    assert "secret" not in str(settings)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("transform --repository r --model m --input i --output o", TransformSettings),
        ("accept small --task fill-mask --backend torch --out o", AcceptSettings),
    ],
)
def test_a_variable_counts_where_a_command_is_not_given_the_option(
    monkeypatch: pytest.MonkeyPatch, command: str, kind: type[TransformSettings | AcceptSettings]
) -> None:
    monkeypatch.setenv(variable_name(kind, "cores"), "2")

    def cores(*arguments: str) -> object:
        return read_options(kind, vars(make_parser().parse_args([*command.split(), *arguments]))).executor.cores

    assert cores() == 2
    assert cores("--cores", "0-2") == "0-2"


@pytest.mark.parametrize(
    "url", ["redis://:secret@host:6379/0", "redis+sentinel://u:secret@a,b/s", "redis://host?password=secret"]
)
def test_a_password_on_the_command_line_is_refused_with_the_way_out(url: str) -> None:
    with pytest.raises(SetupError) as refused:
        read_settings(AllSettings, _REPOSITORY | {"redis_url": url})
    assert "--redis-url: holds a password" in str(refused.value)
    assert "NEURONPIPE_ALL_REDIS_URL" in str(refused.value)
    assert "secret" not in str(refused.value)
