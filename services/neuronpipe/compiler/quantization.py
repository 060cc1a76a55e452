"""Quantizes an OpenVINO model in float32 with NNCF, to int8 or to 8-bit weights with computation in float32."""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from neuronpipe.bundles.manifest import Artifact, Calibration
from neuronpipe.compiler.modules import Batch
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.openvino import engine, openvino

# SmoothQuant's alpha, https://arxiv.org/abs/2211.10438, section 4: 1 moves all of the outliers from activations into
# weights. Weights of 7 bits hold fewer than NNCF's default of 0.95 assumes. Measured in docs/decisions/0008 and 0020.
_SMOOTHING = 0.8

# The layer of the model in the name of an operation, as in
# "…encoder.layer.3.attention.self.key/MatMul".
_LAYER = re.compile(r".*?\.\d+\.")


class Quantizer:
    """Makes int8 artefacts of one model. Each replaces the previous one in the bundle's folder."""

    def __init__(self, artifact: Artifact, folder: Path, batches: Sequence[Batch], calibration: Calibration) -> None:
        """`artifact` is the float32 one in `folder`; `batches` hold one text each."""
        self._artifact = artifact
        self._file = _model_file(artifact, folder)
        self._model = _read(self._file)
        self._batches = batches
        self._calibration = calibration

    @property
    def parts(self) -> tuple[str, ...]:
        """The model's layers, or other parts that multiply matrices, in the order in which they compute."""
        names = [one.get_friendly_name() for one in self._model.get_ordered_ops() if one.get_type_name() == "MatMul"]
        return tuple(dict.fromkeys(layer[0] if (layer := _LAYER.match(name)) else name for name in names))

    def quantize(self, float_parts: Sequence[str] = ()) -> Artifact:
        """Writes the artefact and describes it. `float_parts` compute in float32, on weights of 8 bits.

        Raises SetupError for a model that cannot be quantized.
        """
        with _nncf() as nncf:
            model = self._model.clone() if set(float_parts) >= set(self.parts) else self._quantized(nncf, float_parts)
            if not float_parts and not any(one.get_type_name() == "FakeQuantize" for one in model.get_ops()):
                raise SetupError(
                    f"NNCF {nncf.__version__} finds nothing to quantize in the model; compile it with another --dtype"
                )
            if float_parts:
                model = _compressed(nncf, model)
        openvino.save_model(model, self._file, compress_to_fp16=False)
        described = {"calibration": self._calibration, "float_parts": tuple(float_parts)}
        return _with_version(self._artifact, nncf).model_copy(update=described)

    def _quantized(self, nncf: Any, float_parts: Sequence[str]) -> Any:
        # For transformers NNCF smooths activations (SmoothQuant), keeps layer norms and softmax in float32, and
        # quantizes activations asymmetrically and weights, the embedding table too, per channel. Why the parameters:
        # docs/decisions/0008 and 0020.
        names = [port.any_name for port in self._model.inputs]
        items = [{name: batch[name] for name in names} for batch in self._batches]
        return nncf.quantize(
            self._model.clone(),
            nncf.Dataset(items),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(items),
            ignored_scope=nncf.IgnoredScope(patterns=[f"{re.escape(part)}.*" for part in float_parts], validate=False),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=nncf.OverflowFix.ENABLE,
                smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=_SMOOTHING),
            ),
        )


def compress(artifact: Artifact, folder: Path) -> Artifact:
    """Replaces the artefact's float32 weights by weights of 8 bits, and describes the new ones. Raises SetupError."""
    with _nncf() as nncf:
        for file in (folder / name for name in artifact.files if name.endswith(".xml")):
            openvino.save_model(_compressed(nncf, _read(file)), file, compress_to_fp16=False)
    return _with_version(artifact, nncf)


def _compressed(nncf: Any, model: Any) -> Any:
    return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)


def _with_version(artifact: Artifact, nncf: Any) -> Artifact:
    return artifact.model_copy(update={"versions": artifact.versions | {"nncf": nncf.__version__}})


def _model_file(artifact: Artifact, folder: Path) -> Path:
    return folder / next(name for name in artifact.files if name.endswith(".xml"))


def _read(file: Path) -> Any:
    # Not memory-mapped, because the file of the weights is overwritten.
    return engine().read_model(file, config={"ENABLE_MMAP": False})


@contextlib.contextmanager
def _nncf() -> Iterator[Any]:
    """NNCF, with its progress bars kept off standard output, which is for results.

    Its class of loggers applies to NNCF only. Errors of NNCF in the block become SetupErrors.
    """
    logger_class = logging.getLoggerClass()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            # Imported here, because it takes seconds, and because float32 and bfloat16 compile without NNCF.
            import nncf

            # Not by nncf.set_log_level, which changes the handlers too, and these may be the program's.
            logging.getLogger("nncf").setLevel(logging.CRITICAL)
            try:
                yield nncf
            except SetupError:
                raise
            except Exception as error:  # NNCF may raise anything for an operation that it does not know
                raise SetupError(
                    f"NNCF {nncf.__version__} cannot quantize the model; compile it with another --dtype"
                ) from error
    finally:
        logging.setLoggerClass(logger_class)
