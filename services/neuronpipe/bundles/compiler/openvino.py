"""Converts PyTorch to OpenVINO, with dynamic batch and length."""

import warnings
from collections.abc import Sequence

import torch
import transformers

from neuronpipe.bundles.compiler.accuracy import Conversion, Ran
from neuronpipe.bundles.compiler.architectures import needs_eager_attention
from neuronpipe.bundles.compiler.modules import pretrained_model
from neuronpipe.bundles.compiler.tasks.base import Batch, Outputs
from neuronpipe.bundles.manifest import Artifact
from neuronpipe.core.errors import SetupError
from neuronpipe.runtimes.openvino import engine, has_bfloat16, openvino

# The parts of an int8 artefact that are not quantized compute in float32, and so does all of an int8-weights artefact.
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32", "int8-weights": "f32"}
DTYPES = tuple(_PRECISIONS)
BUCKETS = "none"

_MODEL_FILE = "artifacts/openvino/model.xml"
_WEIGHTS_FILE = "artifacts/openvino/model.bin"


def convert(conversion: Conversion) -> Artifact:
    """See ArtifactCompiler.

    Weights stay float32, for int8 until they are quantized. The dtype is that in which the back end computes.
    """
    module, example, folder, dtype = conversion.module, conversion.example, conversion.folder, conversion.dtype
    if needs_eager_attention(model := pretrained_model(module.module)):
        model.set_attn_implementation("eager")
    inputs = [
        (name, _free(example[name].shape, module.free_axes(name)), openvino.Type(example[name].dtype))
        for name in module.inputs
    ]
    with warnings.catch_warnings(), torch.inference_mode():
        # The tracer warns of every Python value that it treats as constant. Those of these models are constant, as
        # the comparison shows.
        warnings.simplefilter("ignore")
        try:
            model = openvino.convert_model(
                module.module,
                example_input={name: torch.from_numpy(example[name]) for name in module.inputs},
                input=inputs,
            )
        except Exception as error:
            raise SetupError(f"OpenVINO {openvino.__version__} cannot convert {module.architecture}") from error
    if len(model.inputs) != len(module.inputs):
        found = [port.any_name for port in model.inputs]
        raise SetupError(
            f"{module.architecture} uses the inputs {found} of {list(module.inputs)}, which is not supported"
        )
    for port, name in zip(model.inputs, module.inputs, strict=True):  # in order; the tracer drops some of the names
        port.set_names({name})
    for port in model.outputs:
        port.set_names({name for name in port.names if name in module.outputs})
    (folder / _MODEL_FILE).parent.mkdir(parents=True)
    openvino.save_model(model, folder / _MODEL_FILE, compress_to_fp16=False)
    return Artifact(
        backend="openvino",
        dtype=dtype,
        files=(_MODEL_FILE, _WEIGHTS_FILE),
        properties={"INFERENCE_PRECISION_HINT": _PRECISIONS[dtype]},
        versions={
            "openvino": openvino.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )


def _free(shape: Sequence[int], axes: Sequence[int]) -> openvino.PartialShape:
    return openvino.PartialShape([-1 if axis in axes else length for axis, length in enumerate(shape)])


def run(conversion: Conversion, artifact: Artifact, batches: Sequence[Batch]) -> Ran:
    """See ArtifactCompiler."""
    try:
        compiled = engine().compile_model(conversion.folder / _MODEL_FILE, "CPU", dict(artifact.properties))
    except RuntimeError as error:
        raise SetupError(f"OpenVINO {openvino.__version__} cannot compile {conversion.module.architecture}") from error
    names = [port.any_name for port in compiled.inputs]
    outputs: list[Outputs] = []
    for batch in batches:
        result = compiled({name: batch[name] for name in names})
        outputs.append({port.any_name: result[port].copy() for port in compiled.outputs})
    return Ran(outputs, artifact.dtype if artifact.dtype != "bfloat16" or has_bfloat16() else "float32")
