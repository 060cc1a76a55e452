"""Models with a limit of their own: the setting, and their places in the control (gateway/admission.py)."""

import pytest

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Overloaded
from neuronpipe.gateway.admission import Admission, AdmissionControl
from neuronpipe.gateway.settings import PipelineSettings, parse_limits


def test_limits_are_read_by_model() -> None:
    assert parse_limits(" minilm=10, a=b=200,") == {"minilm": 10, "a=b": 200}
    assert parse_limits("") == {}


@pytest.mark.parametrize(
    "written", ["minilm", "=5", "minilm=0", "minilm=-1", "minilm=1.5", "a=1,a=2", "a=²", "a=1000001"]
)
def test_a_limit_that_is_none_is_refused_by_its_words(written: str) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        PipelineSettings(model_concurrency=written)


def test_a_model_has_as_many_places_as_its_limit_and_others_are_not_touched() -> None:
    control = AdmissionControl(100, 100, model_limits={"small": 1})

    def place(model: str) -> Admission:
        return control.admit(Call(), 4, model=model, shed=lambda: None)

    with place("small"), place("other"), place("other"):
        message = "model 'small': 1 requests in flight, the limit is 1"
        with pytest.raises(Overloaded, match=message) as refused, place("small"):
            raise AssertionError
        assert 0 < refused.value.retry_after_s <= 10
    with pytest.raises(KeyError), place("small"):
        raise KeyError  # a request that fails gives its place back, too
    with place("small"):
        pass


def test_adapters_count_as_their_base_unless_the_setting_names_them() -> None:
    control = AdmissionControl(100, 100, model_limits={"small": 1, "small/own": 1})

    def place(model: str) -> Admission:
        return control.admit(Call(), 4, model=model, shed=lambda: None)

    with place("small/one"), place("small/own"):
        with pytest.raises(Overloaded, match="model 'small': 1 requests in flight"), place("small/two"):
            raise AssertionError
        with pytest.raises(Overloaded, match="model 'small/own': 1 requests in flight"), place("small/own"):
            raise AssertionError
