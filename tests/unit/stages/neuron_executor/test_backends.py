"""stages/neuron_executor/backends/: a back end that cannot be loaded says why.
What all of them must do is in tests/contract."""

import dataclasses
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import openvino
import pytest
from openvino import opset13 as opset

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.backends import BACKENDS, load_backend, load_decoder
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest
from neuronpipe.stages.neuron_executor.backends.neuron_runtime import neuron_runtime
from tests.unit.model_specs import model_spec


def _request(*files: Path) -> BackendRequest:
    return BackendRequest(model_spec(), list(files), {}, cores=1, threads=1)


def test_an_unknown_back_end_is_told_which_there_are() -> None:
    with pytest.raises(SetupError, match=r"^back end 'abacus' is not known; there are: openvino, fake"):
        load_backend("abacus", _request())


@pytest.mark.parametrize(("name", "library"), [("openvino", "openvino"), ("torch", "torch"), ("neuronx", "torch")])
def test_a_back_end_whose_library_is_missing_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    for module in (BACKENDS[name].path.partition(":")[0], f"neuronpipe.stages.neuron_executor.runtimes.{library}"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    advice = f"install it with: pip install 'neuronpipe[executor-{name}]'"
    with pytest.raises(SetupError, match=f"^back end '{name}' needs {library}; {re.escape(advice)}$"):
        load_backend(name, _request())


@pytest.mark.parametrize("name", ["openvino", "torch", "neuronx"])
def test_a_decoder_without_the_grammar_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    advice = f"install it with: pip install 'neuronpipe[executor-{name}]'"
    with pytest.raises(SetupError, match=f"^back end '{name}' needs llguidance; {re.escape(advice)}$"):
        load_decoder(name, _request(), max_tokens=64, max_bytes=1 << 20)
    extras = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert any(one.startswith("llguidance") for one in extras["optional-dependencies"][f"executor-{name}"])


def test_without_the_neuron_sdk_the_page_is_named_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)
    neuron_runtime.cache_clear()
    problem = r"^back end 'neuronx' needs torch_neuronx; .*docs/neuron\.md says how to install"
    with pytest.raises(SetupError, match=problem):
        load_backend("neuronx", dataclasses.replace(_request(), buckets=(Bucket(batch=1, tokens=8),)))


def test_a_library_that_is_there_and_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch_neuronx.py").write_text("raise ImportError('libnrt.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_neuronx", raising=False)
    neuron_runtime.cache_clear()
    with pytest.raises(SetupError, match=r"^back end 'neuronx': its library cannot be loaded: libnrt\.so\.1"):
        load_backend("neuronx", dataclasses.replace(_request(), buckets=(Bucket(batch=1, tokens=8),)))


def test_a_back_end_that_takes_one_batch_at_a_time_refuses_several_in_flight() -> None:
    with pytest.raises(SetupError, match=r"^in_flight: 2, the back end 'openvino' takes one batch at a time on a core"):
        load_backend("openvino", dataclasses.replace(_request(), in_flight=2))


def test_openvino_refuses_an_artefact_without_a_model() -> None:
    with pytest.raises(SetupError, match=r"^model 'small': its openvino artefact names no .xml file"):
        load_backend("openvino", _request())


def test_a_decoder_without_a_file_of_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"^model 'small': its openvino artefact names no file of a model"):
        load_decoder("openvino", _request(tmp_path / "model.bin"), max_tokens=64, max_bytes=1 << 20)


def test_openvino_refuses_a_graph_with_an_input_that_the_manifest_does_not_name(tmp_path: Path) -> None:
    given = opset.parameter([-1, -1], np.int64, name="position_ids")
    given.output(0).set_names({"position_ids"})
    openvino.save_model(openvino.Model([opset.result(given)], [given]), tmp_path / "model.xml")
    with pytest.raises(SetupError, match=rf"^{tmp_path}/model.xml: takes position_ids, which the manifest does not"):
        load_backend("openvino", _request(tmp_path / "model.xml"))


def test_openvino_refuses_a_model_that_it_cannot_read_and_names_its_version(tmp_path: Path) -> None:
    path = tmp_path / "model.xml"
    path.write_text("<net/>")
    with pytest.raises(SetupError, match=rf"^{path}: OpenVINO .* cannot load it; compile the model again"):
        load_backend("openvino", _request(path))
