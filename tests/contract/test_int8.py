"""int8 artefacts: what is in them, that they are served as they were measured, and that quantizing is quiet."""

import dataclasses
import hashlib
import logging
import pydoc_data.topics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from neuronpipe import cli
from neuronpipe.bundles.manifest import Artifact, Calibration
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.compiler import CompileRequest, compile_bundle, quantization
from neuronpipe.compiler.accuracy import (
    MIN_TEXTS,
    calibration_batches,
    calibration_texts,
    comparison_batches,
    reference_outputs,
)
from neuronpipe.compiler.tasks import load_module
from neuronpipe.compiler.tokenizers import load_tokenizer
from neuronpipe.core.errors import SetupError
from neuronpipe.core.tensors import Arrays
from neuronpipe.stages.neuron_executor.backends import load_backend
from neuronpipe.stages.neuron_executor.backends.base import Backend, BackendRequest, compute
from neuronpipe.stages.neuron_executor.executor_model import cut
from neuronpipe.stages.neuron_executor.runtimes.openvino import engine, look_up_first, openvino, read
from neuronpipe.tasks.inputs.kind import input_kind
from tests.models.architectures import make_source
from tests.models.compiling import compile_model
from tests.models.repository import MODELS, bert_config, save

pytestmark = pytest.mark.long

_WORDS = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).split()
# From the end of the manual, of which our sample text for calibration takes the second quarter at most.
_TEXTS = [" ".join(_WORDS[-40 * (number + 1) :][: 5 + number // 2]) for number in range(MIN_TEXTS)]

_NAMES = ("classifier", "answerer", "minilm")


@pytest.fixture(scope="module")
def calibration_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As few texts as are allowed, for speed."""
    path = tmp_path_factory.mktemp("calibration") / "texts.txt"
    path.write_text("\n".join(_TEXTS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def int8_repository(sources: dict[str, Path], calibration_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An int8 bundle of a model of each task, all within generous limits."""
    folder = tmp_path_factory.mktemp("int8-repository")
    for name in _NAMES:
        request = CompileRequest(
            str(sources[name]), MODELS[name][0], folder, name, dtype="int8", calibration=calibration_file
        )
        compile_bundle(dataclasses.replace(request, max_divergence=100, min_agreement=0.1), lambda line: None)
    return folder


@pytest.fixture(scope="module", params=_NAMES)
def bundle(request: pytest.FixtureRequest, int8_repository: Path) -> Bundle:
    return read_bundle(int8_repository / request.param / "1")


@pytest.fixture
def compiled(tmp_path: Path, calibration_file: Path) -> Callable[..., Bundle]:
    """Compiles a small embedding model to int8; keyword arguments change the request."""
    source = save(transformers.BertModel(bert_config()), tmp_path / "source")

    def run(**changes: Any) -> Bundle:
        to = (tmp_path / "repository", "model")
        request = CompileRequest(str(source), "sentence_embedding", *to, dtype="int8", calibration=calibration_file)
        return compile_bundle(dataclasses.replace(request, **changes), lambda line: None)

    return run


def _load(bundle: Bundle) -> Backend:
    artifact = bundle.artifact("openvino")
    with bundle.artifact_files(artifact) as files:
        request = BackendRequest(bundle.spec, files, artifact.properties, cores=1, threads=1)
        return load_backend("openvino", request)


def test_matrices_and_embeddings_are_stored_in_eight_bits(bundle: Bundle, repository: Path) -> None:
    model = engine().read_model(bundle.folder / "artifacts/openvino/model.xml")
    constants = [operation for operation in model.get_ops() if operation.get_type_name() == "Constant"]
    matrices = [constant for constant in constants if len(constant.shape) == 2 and min(constant.shape) > 4]
    # Of positions and token types NNCF leaves those that the model adds up before anything is computed from them.
    in_eight_bits = sum(constant.data.size for constant in matrices if constant.get_element_type() == openvino.Type.i8)
    assert in_eight_bits > 0.95 * sum(constant.data.size for constant in matrices)
    assert any(operation.get_type_name() == "FakeQuantize" for operation in model.get_ops())
    # A quarter, the scales of the rows, and what stays in float32.
    assert _size(bundle) < 0.32 * _size(read_bundle(repository / bundle.spec.name / "1"))


def _size(bundle: Bundle) -> int:
    return (bundle.folder / "artifacts/openvino/model.bin").stat().st_size


# Architectures and their tasks. The head of a masked language model multiplies by the table of words.
_WITH_TABLES = (
    *(("BERT", "fill_mask"), ("ALBERT", "fill_mask"), ("ModernBERT", "fill_mask"), ("MPNet", "text_classification")),
    *(("XLM-R", "sentence_embedding"), ("DeBERTa-v3", "text_classification"), ("Longformer", "text_classification")),
    *(("Jina v3", "text_classification"), ("Qwen3", "sentence_embedding"), ("Gemma 3", "sentence_embedding")),
)


@pytest.mark.parametrize(("architecture", "task"), _WITH_TABLES)
def test_no_table_is_dequantized_as_a_whole_and_the_outputs_are_the_same(
    architecture: str, task: str, calibration_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[openvino.Model] = []

    def look_up(model: openvino.Model) -> None:
        whole.append(model.clone())
        look_up_first(model)

    monkeypatch.setattr(quantization, "look_up_first", look_up)
    source = make_source(tmp_path / "source", architecture, task)
    bundle = compile_model(source, tmp_path, task, dtype="int8", calibration=calibration_file)
    file = bundle.folder / "artifacts/openvino/model.xml"

    tables = _tables(whole[0])
    assert tables
    expected, held = _computed(whole[0], tables)
    assert "f32" in held
    outputs, held = _computed(engine().read_model(file), tables)
    assert held == {"i8"}
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array)
    # If shapes are fixed, OpenVINO may fuse other operations than before, which rounds other sums once.
    _, held = _computed(engine().read_model(file), tables, has_fixed_shape=True)
    assert held == {"i8"}


def _tables(model: openvino.Model) -> set[tuple[int, ...]]:
    """The shapes of the tables that are dequantized before rows are looked up."""
    gathers = [node.input_value(0) for node in model.get_ops() if node.get_type_name() == "Gather"]
    shapes = {tuple(gather.get_shape()) for gather in gathers if gather.get_node().get_type_name() == "Multiply"}
    return {shape for shape in shapes if shape[0] > 1}


def _computed(
    model: openvino.Model, tables: set[tuple[int, ...]], *, has_fixed_shape: bool = False
) -> tuple[Arrays, set[str]]:
    """The outputs for `_inputs`, and the types in which the compiled graph holds tables."""
    inputs = {port.any_name: _inputs(tables)[port.any_name] for port in model.inputs}
    if has_fixed_shape:
        model.reshape({name: list(array.shape) for name, array in inputs.items()})
    compiled = engine().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    outputs = compiled(inputs)
    nodes = compiled.get_runtime_model().get_ops()
    constants = [node.output(0) for node in nodes if node.get_rt_info()["layerType"].astype(str) == "Const"]
    held = {
        constant.get_element_type().get_type_name() for constant in constants if tuple(constant.get_shape()) in tables
    }
    return {port.any_name: outputs[port].copy() for port in compiled.outputs}, held


def _inputs(tables: set[tuple[int, ...]]) -> Arrays:
    ids = np.random.default_rng(20261128).integers(5, max(tables)[0], (3, 9))
    mask = np.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "mask_position": mask, "token_type_ids": np.zeros_like(ids)}


async def test_a_bundle_whose_tables_are_dequantized_as_a_whole_is_served_with_the_same_outputs(
    compiled: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions wrote such bundles."""
    with monkeypatch.context() as patched:
        patched.setattr(quantization, "look_up_first", lambda model: None)
        bundle = compiled()
    model = engine().read_model(bundle.folder / "artifacts/openvino/model.xml")
    tables = _tables(model)
    expected, _ = _computed(model, tables)
    served: list[openvino.Model] = []

    def read_and_keep(path: Path) -> openvino.Model:
        served.append(read(path))
        return served[-1]

    monkeypatch.setattr("neuronpipe.stages.neuron_executor.backends.openvino.read", read_and_keep)
    backend = _load(bundle)
    outputs = await compute(backend, 0, {name: _inputs(tables)[name] for name in bundle.spec.inputs})
    backend.close()
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array)
    assert _computed(served[0], tables)[1] == {"i8"}


def test_manifest_says_how_the_artefact_was_made(bundle: Bundle, calibration_file: Path) -> None:
    artifact = bundle.artifact("openvino")
    assert artifact.dtype == "int8"
    assert artifact.properties == {"INFERENCE_PRECISION_HINT": "f32"}
    assert set(artifact.versions) == {"nncf", "openvino", "torch", "transformers"}
    assert artifact.calibration is not None
    assert artifact.calibration.texts == MIN_TEXTS / 2
    assert artifact.calibration.source == str(calibration_file)
    assert artifact.calibration.source_sha256 == hashlib.sha256(calibration_file.read_bytes()).hexdigest()
    assert artifact.accuracy is not None
    assert artifact.accuracy.computed_dtype == "int8"
    assert artifact.accuracy.samples == MIN_TEXTS / 2
    assert artifact.accuracy.sample_texts == f"{MIN_TEXTS // 2} other texts of {calibration_file}"
    assert artifact.float_parts == ()
    assert artifact.accuracy.agreement is not None
    # Weights made of chance leave near ties between a text's positions; positions of chance would agree for one text in
    # a thousand.
    assert artifact.accuracy.agreement > 0.6


async def test_served_outputs_are_as_close_to_pytorch_as_the_manifest_says(bundle: Bundle) -> None:
    source = Path(bundle.manifest.source.location)
    module = load_module(source, bundle.spec.task, load_tokenizer(source))
    batches = comparison_batches(module, _TEXTS[1::2])
    backend = _load(bundle)
    difference = 0.0
    for batch, expected in zip(batches, reference_outputs(module, batches), strict=True):
        outputs = await compute(backend, 0, {name: batch[name] for name in module.inputs})
        for name, array in expected.items():
            off = np.abs(outputs[name] - array)
            difference = max(
                difference, float((off[batch["attention_mask"] == 1] if "answering" in module.task else off).max())
            )
    backend.close()

    accuracy = bundle.artifact("openvino").accuracy
    assert accuracy is not None
    # The same numbers in the same batches; one thread may add them up in another order, and a step of a quantizer is
    # then the other one.
    assert difference < 1.05 * accuracy.largest_difference
    # And it is the artefact of 8 bits that was served: float32 is a thousand times closer.
    assert difference > 0.1 * accuracy.largest_difference


async def test_batch_mates_and_padding_change_a_sequences_outputs_less_than_int8_does(bundle: Bundle) -> None:
    backend = _load(bundle)
    generator = np.random.default_rng(20261121)

    def sequence(tokens: int) -> Arrays:
        arrays = {"input_ids": generator.integers(0, bundle.spec.vocabulary_size, tokens).astype(np.int32)}
        return arrays | (
            {"token_type_ids": np.zeros(tokens, np.int32)} if "token_type_ids" in bundle.spec.inputs else {}
        )

    async def run(*sequences: Arrays) -> list[Arrays]:
        lengths = [len(arrays["input_ids"]) for arrays in sequences]
        outputs = await compute(
            backend, 0, input_kind(bundle.spec).pad(sequences, backend.shapes.round_tokens(max(lengths)))
        )
        return [cut(outputs, row, tokens, bundle.spec.outputs) for row, tokens in enumerate(lengths)]

    sequences = [sequence(tokens) for tokens in (5, 17, 3, 40, 8)]
    together = await run(*sequences)
    alone = [(await run(sequence))[0] for sequence in sequences]
    backend.close()

    accuracy = bundle.artifact("openvino").accuracy
    assert accuracy is not None
    # In another shape float32 sums are rounded otherwise (1e-7 of them), and a number at the border of two steps of a
    # quantizer takes the other one, which the layers behind it pass on.
    for outputs, expected in zip(together, alone, strict=True):
        for name, array in expected.items():
            np.testing.assert_allclose(outputs[name], array, rtol=0, atol=0.5 * accuracy.largest_difference)


def test_layers_that_lose_most_stay_in_float32_where_the_agreement_is_too_low(compiled: Callable[..., Bundle]) -> None:
    """And no more of them than that takes: one of two here."""
    in_int8, weights_only = compiled(), compiled(dtype="int8-weights", calibration=None)
    least, most = (_agreement(bundle) for bundle in (in_int8, weights_only))
    assert least < most
    limit = least + 0.1 * (most - least)
    artifact = compiled(min_agreement=limit).artifact("openvino")
    assert artifact.dtype == "int8"
    assert len(artifact.float_parts) == 1
    assert artifact.float_parts[0].endswith((".layer.0.", ".layer.1."))
    assert artifact.accuracy is not None
    assert artifact.accuracy.agreement is not None
    assert artifact.accuracy.agreement >= limit


def test_layers_in_float32_keep_weights_of_eight_bits(compiled: Callable[..., Bundle]) -> None:
    in_int8 = compiled()
    mixed = compiled(min_agreement=_agreement(in_int8) + 1e-6)
    assert mixed.artifact("openvino").float_parts
    assert _size(mixed) < 1.05 * _size(in_int8)
    assert 0 < _quantizers(mixed) < _quantizers(in_int8)


def test_weights_alone_of_eight_bits_need_no_texts_and_multiply_in_float32(compiled: Callable[..., Bundle]) -> None:
    in_float32, bundle = compiled(dtype="float32", calibration=None), compiled(dtype="int8-weights", calibration=None)
    artifact = bundle.artifact("openvino")
    assert (artifact.dtype, artifact.calibration, artifact.float_parts) == ("int8-weights", None, ())
    assert _size(bundle) < 0.32 * _size(in_float32)
    assert _quantizers(bundle) == 0
    assert artifact.accuracy is not None
    assert artifact.accuracy.computed_dtype == "int8-weights"
    assert artifact.accuracy.sample_texts == "built-in sample text in 17 languages"


def _agreement(bundle: Bundle) -> float:
    accuracy = bundle.artifact("openvino").accuracy
    assert accuracy is not None
    assert accuracy.agreement is not None
    return accuracy.agreement


def _quantizers(bundle: Bundle) -> int:
    model = engine().read_model(bundle.folder / "artifacts/openvino/model.xml")
    return sum(operation.get_type_name() == "FakeQuantize" for operation in model.get_ops())


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_divergence": 1e-9}, r"the limit is 1.00e-09 \(--max-divergence\)"),
        ({"min_agreement": 1.0}, r"agreement with PyTorch float32 is 0\.\d+, the limit is 1 \(--min-agreement\)"),
    ],
    ids=str,
)
def test_artefact_beyond_a_limit_leaves_nothing_behind(
    limit: dict[str, Any], message: str, compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    with pytest.raises(SetupError, match=message):
        compiled(**limit)
    assert list((tmp_path / "repository").rglob("*")) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "text_classification", "dtype": "float32"}, "--calibration is for --dtype int8; float32 needs none"),
        (
            {"task": "text_classification", "dtype": "int8-weights"},
            "--calibration is for --dtype int8; int8-weights needs none",
        ),
        ({"backend": "fake"}, "dtype 'int8' is not known for fake"),
        ({"max_divergence": -0.1}, "--max-divergence -0.1: must be 0 or more"),
        ({"max_divergence": float("nan")}, "--max-divergence nan: must be 0 or more"),
        ({"min_agreement": 0.0}, "--min-agreement 0.0: must be more than 0 and at most 1"),
        ({"min_agreement": 1.01}, "--min-agreement 1.01: must be"),
        ({"min_agreement": float("nan")}, "--min-agreement nan: must be"),
        ({"calibration": Path("/no/such/file")}, "--calibration /no/such/file: No such file or directory"),
        (
            {"calibration": Path(__file__).with_name("__init__.py")},
            "0 different texts, one a line; calibration takes at least 64",
        ),
    ],
    ids=str,
)
def test_request_that_makes_no_sense_is_refused_before_the_model_is_read(
    changes: dict[str, Any], message: str, compiled: Callable[..., Bundle]
) -> None:
    with pytest.raises(SetupError, match=message):
        compiled(source="/no/such/model", **changes)


def test_calibration_and_comparison_share_no_text(sources: dict[str, Path]) -> None:
    source = sources["classifier"]
    tokenizer = load_tokenizer(source)
    module = load_module(source, "text_classification", tokenizer)
    compared = " ".join(
        tokenizer.transformers_tokenizer.decode(row, skip_special_tokens=True)
        for batch in comparison_batches(module)
        for row in batch["input_ids"]
    )
    for (row,) in (batch["input_ids"] for batch in calibration_batches(module, calibration_texts())):
        if (
            len(row) > 30
        ):  # shorter ones are words that any text may have, and scripts of which the tokenizer knows nothing
            assert tokenizer.transformers_tokenizer.decode(row, skip_special_tokens=True) not in compared


def test_answering_is_calibrated_and_compared_on_questions_with_their_contexts(sources: dict[str, Path]) -> None:
    source = sources["answerer"]
    tokenizer = load_tokenizer(source)
    module = load_module(source, "question_answering", tokenizer)

    (batch,) = calibration_batches(module, ["one two three four five six seven eight nine ten."])

    question = "one two three four five six seven eight"
    assert (
        tokenizer.transformers_tokenizer.decode(batch["input_ids"][0])
        == f"[CLS] {question} [SEP] {question} nine ten. [SEP]"
    )
    assert all(batch["token_type_ids"].max() == 1 for batch in comparison_batches(module))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--dtype", "int8", "--calibration", "/no/such/file"),
            "--calibration /no/such/file: No such file or directory",
        ),
        (("--min-agreement", "2"), "--min-agreement 2.0: must be more than 0 and at most 1"),
        (("--max-divergence", "-1"), "--max-divergence -1.0: must be 0 or more"),
    ],
    ids=str,
)
def test_options_of_the_command_reach_the_compiler(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compile", str(tmp_path), "--task", "text-classification", "--repository", str(tmp_path), *options])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"neuronpipe: {message}\n"


_PROGRAM = """
import socket, sys
from neuronpipe import cli

def refuse(*arguments, **options):
    print("network:", arguments, file=sys.stderr)
    raise OSError("no network here")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
cli.main(sys.argv[1:])
"""


def test_command_prints_its_own_lines_only_and_sends_and_leaves_nothing(
    sources: dict[str, Path], calibration_file: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    arguments = (
        f"compile {sources['classifier']} --task text-classification --repository {tmp_path}/repository --name model "
        f"--dtype int8 --calibration {calibration_file}"
    )
    command, environment = [sys.executable, "-c", _PROGRAM, *arguments.split()], {"HOME": str(home)}
    process = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)

    assert process.returncode == 0, process.stderr
    assert process.stdout == f"{tmp_path}/repository/model/1\n"
    lines = process.stderr.splitlines()
    assert [line for line in lines if not line.startswith(("[", "      "))] == []
    assert [line[:5] for line in lines if line.startswith("[")] == [f"[{number}/7]" for number in range(1, 8)]
    assert list(home.rglob("*")) == []


def test_class_of_loggers_stays_as_it_was(int8_repository: Path) -> None:
    assert "nncf" in sys.modules
    assert logging.getLoggerClass() is logging.Logger


class _Choice(torch.nn.Module):
    """A layer, eight rows that a comparison chooses from its vectors, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(24, 24), torch.nn.Linear(24, 32)

    def forward(self, numbers: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        chosen = (numbers.unsqueeze(1) == torch.arange(8)[:, None]).to(vectors.dtype) @ self.first(vectors)
        result: torch.Tensor = self.last(chosen)
        return result


def test_rows_that_a_comparison_chooses_are_chosen_in_float32(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    numbers = np.stack([rng.permutation(40) for _ in range(2)])
    vectors = rng.normal(size=(2, 40, 24)).astype(np.float32)
    module, given = _Choice().eval(), (torch.from_numpy(numbers), torch.from_numpy(vectors))
    model = openvino.convert_model(module, example_input=given)
    for port, name in zip(model.inputs, ("numbers", "vectors"), strict=True):
        port.get_tensor().set_names({name})
    openvino.save_model(model, tmp_path / "m.xml", compress_to_fp16=False)

    batches: list[Arrays] = [{"numbers": numbers, "vectors": vectors}]
    artifact = Artifact(backend="openvino", dtype="float32", files=("m.xml", "m.bin"))
    quantization.Quantizer(artifact, tmp_path, batches, Calibration(source="random", texts=2)).quantize()

    compiled = engine().compile_model(read(tmp_path / "m.xml"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    with torch.inference_mode():
        expected = module(*given).numpy()
    # int8 has steps of a 127th of the largest value; 24 products add up.
    assert np.abs(compiled(batches[0])[0] - expected).max() < 0.05 * np.abs(expected).max()
