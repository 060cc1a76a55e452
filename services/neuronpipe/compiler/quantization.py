"""Quantizes an OpenVINO model in float32 with NNCF, to int8 or to 8-bit weights with computation in float32.

The layers that lose most in int8 may stay in float32. int8 vectors are made by the range of each dimension.
"""

import contextlib
import dataclasses
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from neuronpipe.bundles.manifest import Accuracy, Artifact, Calibration
from neuronpipe.compiler import accuracy
from neuronpipe.compiler.conversion import ArtifactCompiler, Conversion
from neuronpipe.compiler.modules import Outputs, SampleBatch, SourceModule
from neuronpipe.compiler.saved_files import refusing
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.openvino import engine, look_up_first, openvino
from neuronpipe.tasks.vectors import EmbeddingFacts, normalized, vector_of

# SmoothQuant's alpha, https://arxiv.org/abs/2211.10438, section 4: 1 moves all outliers from activations into weights.
# Weights of 7 bits hold fewer than NNCF's default of 0.95 assumes. Measured in docs/decisions/0008 and 0020.
_SMOOTHING = 0.8

# The layer of the model in the name of an operation, such as
# "…encoder.layer.3.attention.self.key/MatMul".
_LAYER = re.compile(r".*?\.\d+\.")


class Quantizer:
    """Makes int8 artefacts of a model. Each artefact replaces the previous artefact in the bundle's folder."""

    def __init__(
        self, artifact: Artifact, folder: Path, batches: Sequence[SampleBatch], calibration: Calibration
    ) -> None:
        self._artifact = artifact
        self._file = folder / next(name for name in artifact.files if name.endswith(".xml"))
        self._model = _read(self._file)
        self._batches = batches
        self._calibration = calibration

    @property
    def parts(self) -> tuple[str, ...]:
        """The model's layers, or other parts that multiply matrices, in the order in which they compute."""
        names = [product.get_friendly_name() for product in _products(self._model)]
        return tuple(dict.fromkeys(layer[0] if (layer := _LAYER.match(name)) else name for name in names))

    def quantize(self, float_parts: Sequence[str] = ()) -> Artifact:
        """Writes and describes the artefact. `float_parts` compute in float32, on 8-bit weights. Raises SetupError."""
        with _nncf() as nncf:
            model = self._model.clone() if set(float_parts) >= set(self.parts) else self._quantized(nncf, float_parts)
            kinds = {operation.get_type_name() for operation in model.get_ops()}
            if not float_parts and "FakeQuantize" not in kinds:
                raise SetupError(
                    f"NNCF {nncf.__version__} finds nothing to quantize in the model; compile it with another --dtype"
                )
            if float_parts:
                model = _compressed(nncf, model)
        look_up_first(model)
        openvino.save_model(model, self._file, compress_to_fp16=False)
        described = {"calibration": self._calibration, "float_parts": tuple(float_parts)}
        return _with_version(self._artifact, nncf).model_copy(update=described)

    def _quantized(self, nncf: Any, float_parts: Sequence[str]) -> Any:
        # For transformers NNCF smooths activations (SmoothQuant), keeps layer norms and softmax in float32, and
        # quantizes activations asymmetrically and weights per channel, also the embedding table. Reasons for the
        # parameters: docs/decisions/0008 and 0020.
        names = [port.any_name for port in self._model.inputs]
        items = [{name: batch[name] for name in names} for batch in self._batches]
        return nncf.quantize(
            self._model.clone(),
            nncf.Dataset(items),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(items),
            ignored_scope=nncf.IgnoredScope(
                names=_float_products(self._model),
                patterns=[f"{re.escape(part)}.*" for part in float_parts],
                validate=False,
            ),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=nncf.OverflowFix.ENABLE,
                smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=_SMOOTHING),
            ),
        )


def _float_products(model: Any) -> list[str]:
    """Returns the names of the products that stay in float32.

    - Products that choose rows: a factor is 0 or 1, from a comparison. They lose accuracy in int8.
    - Layers that read a product of two activations. NNCF smooths what a layer reads by a number for each channel;
      OpenVINO 2026.4 applies these numbers to another dimension of such products, or refuses the graph.

    A GLiNER's best label was right for 0.21 of the samples, and for 0.94 with these in float32 (2026-11-30).
    """
    return [
        product.get_friendly_name()
        for product in _products(model)
        if any(_is_choice(factor) or _has_no_weight(factor) for factor in _factors(product))
    ]


def _products(model: Any) -> list[Any]:
    """Returns the products of matrices in the order in which they are computed."""
    return [node for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]


def _factors(product: Any) -> list[Any]:
    return [value.get_source_output().get_node() for value in product.inputs()]


def _is_choice(node: Any) -> bool:
    return node.get_type_name() == "Convert" and node.input(0).get_element_type() == openvino.Type.boolean


def _has_no_weight(node: Any) -> bool:
    """Returns whether a node is a product of two activations."""
    return node.get_type_name() == "MatMul" and all(part.get_type_name() != "Constant" for part in _factors(node))


def compress(artifact: Artifact, folder: Path) -> Artifact:
    """Replaces float32 weights by weights of 8 bits, and describes the new artefact. Raises SetupError."""
    with _nncf() as nncf:
        for file in (folder / name for name in artifact.files if name.endswith(".xml")):
            openvino.save_model(_compressed(nncf, _read(file)), file, compress_to_fp16=False)
    return _with_version(artifact, nncf)


def _compressed(nncf: Any, model: Any) -> Any:
    return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)


def _with_version(artifact: Artifact, nncf: Any) -> Artifact:
    return artifact.model_copy(update={"versions": artifact.versions | {"nncf": nncf.__version__}})


def _read(file: Path) -> Any:
    # Not memory-mapped, because the file of the weights is overwritten.
    return engine().read_model(file, config={"ENABLE_MMAP": False})


@contextlib.contextmanager
def _nncf() -> Iterator[Any]:
    """Imports NNCF without its progress bars on standard output. Errors of NNCF in the block become SetupErrors."""
    logger_class = logging.getLoggerClass()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            # Imported here, because it takes seconds, and because float32 and bfloat16 compile without NNCF.
            import nncf

            # nncf.set_log_level also changes the handlers, which may belong to the program.
            logging.getLogger("nncf").setLevel(logging.CRITICAL)
            problem = f"NNCF {nncf.__version__} cannot quantize the model; compile it with another --dtype"
            with refusing(problem, why=None):
                yield nncf
    finally:
        logging.setLoggerClass(logger_class)


# Number of texts that rank the parts. Calibration texts rank them, so that the texts of the comparison do not.
_RANKING_TEXTS = 32

Measure = Callable[[Artifact], Accuracy | None]


def rank(
    quantizer: Quantizer, compiler: ArtifactCompiler, conversion: Conversion, batches: Sequence[SampleBatch]
) -> list[str]:
    """Ranks the model's parts, first the part whose float32 leaves the smallest error. Quantizes once for each part."""
    sample = batches[:: max(1, len(batches) // _RANKING_TEXTS)]
    reference = accuracy.reference_outputs(conversion.module, sample)
    errors: dict[str, float] = {}
    for part in quantizer.parts:
        ran = compiler.run(conversion, quantizer.quantize((part,)), sample)
        pairs = zip(ran.outputs if ran else (), reference, strict=True)
        differences = (outputs[name] - array for outputs, expected in pairs for name, array in expected.items())
        errors[part] = float(np.mean([np.mean(difference**2) for difference in differences]))
    return sorted(errors, key=lambda part: errors[part])


def search(
    quantizer: Quantizer, ranked: Sequence[str], measure: Measure, min_agreement: float
) -> tuple[Artifact, Accuracy | None]:
    """Finds the artefact that meets the limit with the fewest ranked parts in float32, or else with all parts."""
    fewest, most = 1, len(ranked)
    while fewest < most:
        count = (fewest + most) // 2
        if accuracy.agrees(measure(quantizer.quantize(ranked[:count])), min_agreement):
            most = count
        else:
            fewest = count + 1
    artifact = quantizer.quantize(ranked[:most])
    return artifact, measure(artifact)


# Tasks that get int8 ranges. Tasks with images get none, because ranges from sample images would not fit photographs.
EMBEDDING_TASKS = ("sentence_embedding", "sentence_similarity")


def with_ranges(module: SourceModule, outputs: Sequence[Outputs]) -> SourceModule:
    """Adds the range of each dimension of a module's vectors to its facts: int8 vectors are made by the ranges.

    `outputs`: PyTorch's outputs for the texts of the comparison: some 120 sample texts in many languages, or up to 128
    texts of --calibration. quantize_embeddings of sentence-transformers advises 100 or more. A module of another task
    stays as it is.
    """
    if module.task not in EMBEDDING_TASKS:
        return module
    vectors = normalized(np.concatenate([vector_of(outputs_of_batch) for outputs_of_batch in outputs]))
    ranges = {"lowest": tuple(vectors.min(axis=0).tolist()), "highest": tuple(vectors.max(axis=0).tolist())}
    facts = {
        task: task_facts.model_copy(update=ranges) if isinstance(task_facts, EmbeddingFacts) else task_facts
        for task, task_facts in module.facts.items()
    }
    return dataclasses.replace(module, facts=facts)
