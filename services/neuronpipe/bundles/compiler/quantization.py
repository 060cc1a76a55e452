"""An OpenVINO model in float32 to one that computes in int8, by NNCF."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from neuronpipe.bundles.compiler.tasks.base import Batch
from neuronpipe.bundles.manifest import Artifact, Calibration
from neuronpipe.core.errors import SetupError
from neuronpipe.runtimes.openvino import engine, openvino

# SmoothQuant's alpha, https://arxiv.org/abs/2211.10438, section 4: 1 moves all of the outliers from activations into weights. Weights of
# 7 bits hold fewer than NNCF's default of 0.95 assumes. Measured in docs/decisions/0008.
_SMOOTHING = 0.8


def quantize(artifact: Artifact, folder: Path, batches: Sequence[Batch], calibration: Calibration) -> Artifact:
    """Replaces the artefact's float32 files, and describes the new ones. Raises SetupError for a model that cannot be quantized."""
    model_file = folder / next(name for name in artifact.files if name.endswith(".xml"))
    with _quiet():
        # Here, because it takes seconds, and because float32 and bfloat16 compile where NNCF cannot be installed.
        import nncf

        nncf.set_log_level(logging.CRITICAL)
        try:
            # Not mapped, for the file of the weights is written over.
            model = _quantize(nncf, engine().read_model(model_file, config={"ENABLE_MMAP": False}), batches)
        except Exception as error:  # whatever NNCF raises for an operation that it does not know
            raise SetupError(f"NNCF {nncf.__version__} cannot quantize the model; compile it with another --dtype") from error
    if not any(operation.get_type_name() == "FakeQuantize" for operation in model.get_ops()):
        raise SetupError(f"NNCF {nncf.__version__} finds nothing to quantize in the model; compile it with another --dtype")
    openvino.save_model(model, model_file, compress_to_fp16=False)
    return artifact.model_copy(update={"versions": artifact.versions | {"nncf": nncf.__version__}, "calibration": calibration})


def _quantize(nncf: Any, model: Any, batches: Sequence[Batch]) -> Any:
    # For transformers NNCF smooths activations (SmoothQuant), keeps layer norms and softmax in float32, and quantizes activations
    # asymmetrically and weights, the embedding table too, per channel. Why the parameters: docs/decisions/0008.
    names = [port.any_name for port in model.inputs]
    items = [{name: batch[name] for name in names} for batch in batches]
    return nncf.quantize(
        model,
        nncf.Dataset(items),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(items),
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            overflow_fix=nncf.OverflowFix.ENABLE,
            smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=_SMOOTHING),
        ),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps NNCF's progress bars off standard output, which is for results, and its class of loggers to itself."""
    logger_class = logging.getLoggerClass()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.setLoggerClass(logger_class)
