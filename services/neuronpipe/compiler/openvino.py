"""Converts PyTorch to OpenVINO, with dynamic batch and length."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.compiler.architectures import needs_eager_attention
from neuronpipe.compiler.conversion import Conversion, Ran
from neuronpipe.compiler.modules import Batch, Outputs, Positional, SourceModule, pretrained_model
from neuronpipe.compiler.own_graphs import taking_rows
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.openvino import computable, engine, has_bfloat16, openvino
from neuronpipe.stages.neuron_executor.runtimes.parts import part_names

# The parts of an int8 artefact that are not quantized compute in float32, and so does all of an int8-weights artefact.
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32", "int8-weights": "f32"}
DTYPES = tuple(_PRECISIONS)
BUCKETS = "none"

_FOLDER = "artifacts/openvino"
_MODEL = "model"


def convert(conversion: Conversion) -> Artifact:
    """See ArtifactCompiler.

    Weights stay float32, for int8 until they are quantized. The dtype is that in which the back end computes.
    """
    module, folder, dtype = conversion.module, conversion.folder, conversion.dtype
    if needs_eager_attention(model := pretrained_model(module.module)):
        model.set_attn_implementation("eager")
    (folder / _FOLDER).mkdir(parents=True)
    files = []
    # Quantized where rows are taken, embeddings had a cosine similarity of 0.72 in place of 0.97.
    with taking_rows(model) if dtype != "int8" else contextlib.nullcontext():
        for name, (part, example) in zip(part_names(_MODEL, conversion.parts), conversion.each_part(), strict=True):
            _convert(part, example, folder / _FOLDER / f"{name}.xml")
            files += [f"{_FOLDER}/{name}.xml", f"{_FOLDER}/{name}.bin"]
    return Artifact(
        backend="openvino",
        dtype=dtype,
        files=tuple(files),
        properties={"INFERENCE_PRECISION_HINT": _PRECISIONS[dtype]},
        pipeline_cores=conversion.parts,
        versions={
            "openvino": openvino.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )


def _convert(module: SourceModule, example: Mapping[str, torch.Tensor], path: Path) -> None:
    inputs = [
        (_free(example[name].shape, module.free_axes(name)), openvino.Type(example[name].numpy().dtype))
        for name in module.inputs
    ]
    with warnings.catch_warnings(), torch.inference_mode():
        # The tracer warns of every Python value that it treats as constant. Those of these models are constant, as
        # the comparison shows.
        warnings.simplefilter("ignore")
        try:
            model = openvino.convert_model(
                Positional(module.module, module.inputs, module.outputs),
                example_input=tuple(example.values()),
                input=inputs,
            )
        except Exception as error:
            raise SetupError(f"OpenVINO {openvino.__version__} cannot convert {module.architecture}") from error
    if len(model.inputs) != len(module.inputs):
        found = [port.any_name for port in model.inputs]
        raise SetupError(
            f"{module.architecture} uses the inputs {found} of {list(module.inputs)}, which is not supported"
        )
    for port, name in zip([*model.inputs, *model.outputs], [*module.inputs, *module.outputs], strict=True):
        port.set_names({name})
    openvino.save_model(model, path, compress_to_fp16=False)


def _free(shape: Sequence[int], axes: Sequence[int]) -> openvino.PartialShape:
    return openvino.PartialShape([-1 if axis in axes else length for axis, length in enumerate(shape)])


def run(conversion: Conversion, artifact: Artifact, batches: Sequence[Batch]) -> Ran:
    """See ArtifactCompiler."""
    paths = [conversion.folder / name for name in artifact.files if name.endswith(".xml")]
    try:
        parts = [engine().compile_model(path, "CPU", computable(artifact.properties)) for path in paths]
    except RuntimeError as error:
        raise SetupError(f"OpenVINO {openvino.__version__} cannot compile {conversion.module.architecture}") from error
    outputs: list[Outputs] = []
    for batch in batches:
        values = dict(batch)
        for part in parts:
            result = part({port.any_name: values[port.any_name] for port in part.inputs})
            values |= {port.any_name: result[port].copy() for port in part.outputs}
        outputs.append({name: values[name] for name in conversion.module.outputs})
    return Ran(outputs, artifact.dtype if artifact.dtype != "bfloat16" or has_bfloat16() else "float32")
