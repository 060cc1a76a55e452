"""neuron_executor/backends/: a back end that cannot be loaded says why. What all of them must do is in tests/contract."""

import sys
from pathlib import Path

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.neuron_executor.backends import BACKENDS, load_backend
from neuronpipe.neuron_executor.backends.base import LoadRequest
from tests.unit.model_specs import model_spec


def _request(*files: Path) -> LoadRequest:
    return LoadRequest(model_spec(), list(files), {}, cores=1, threads=1)


def test_an_unknown_back_end_is_told_which_there_are() -> None:
    with pytest.raises(SetupError, match=r"^back end 'abacus' is not known; there are: openvino, fake"):
        load_backend("abacus", _request())


def test_a_back_end_whose_library_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (BACKENDS["openvino"].partition(":")[0], "neuronpipe.core.openvino"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(SetupError, match=r"^back end 'openvino' needs openvino; install it with: pip install .*executor-openvino"):
        load_backend("openvino", _request())


def test_openvino_refuses_an_artefact_without_a_model() -> None:
    with pytest.raises(SetupError, match=r"^model 'small': its openvino artefact names no .xml file"):
        load_backend("openvino", _request())


def test_openvino_refuses_a_model_that_it_cannot_read_and_names_its_version(tmp_path: Path) -> None:
    path = tmp_path / "model.xml"
    path.write_text("<net/>")
    with pytest.raises(SetupError, match=rf"^{path}: OpenVINO .* cannot load it; compile the model again"):
        load_backend("openvino", _request(path))
