"""Converts PyTorch to OpenVINO, with dynamic batch and length."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.compiler.architectures import compute_by_expert, needs_eager_attention
from neuronpipe.compiler.conversion import Conversion, Ran
from neuronpipe.compiler.modules import (
    Named,
    Outputs,
    PooledModule,
    Positional,
    SampleBatch,
    SourceModule,
    pretrained_model,
)
from neuronpipe.compiler.onnx import HIDDEN, OnnxModel, onnx_model
from neuronpipe.compiler.own_graphs import taking_rows
from neuronpipe.compiler.saved_files import cause_of, refusing
from neuronpipe.compiler.stacked_adapters import TakingStacks, stacks_of
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.openvino import (
    PRECISION,
    STACKS_FILE,
    computable,
    convert_model,
    engine,
    openvino,
    traced,
    with_stacks,
)
from neuronpipe.stages.neuron_executor.runtimes.parts import part_names

# The parts of an int8 artefact that are not quantized compute in float32, and so does an int8-weights artefact.
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32", "int8-weights": "f32"}
DTYPES = tuple(_PRECISIONS)
BUCKETS = "none"

_FOLDER = "artifacts/openvino"
_MODEL = "model"


def convert(conversion: Conversion) -> Artifact:
    """Converts the module to OpenVINO, with weights in float32; see ArtifactCompiler."""
    module, folder, dtype = conversion.module, conversion.folder, conversion.dtype
    model = onnx_model(module.module) or pretrained_model(module.module)
    if not isinstance(model, OnnxModel):
        compute_by_expert(model)
        if needs_eager_attention(model):
            model.set_attn_implementation("eager")
    (folder / _FOLDER).mkdir(parents=True)
    files = []
    # Not before quantization: with `taking_rows`, quantized embeddings had a cosine similarity of 0.72, not 0.97.
    with taking_rows(model) if dtype != "int8" else contextlib.nullcontext():
        for name, (part, example) in zip(part_names(_MODEL, conversion.parts), conversion.each_part(), strict=True):
            _convert(part, example, folder / _FOLDER / f"{name}.xml")
            files += [f"{_FOLDER}/{name}.xml", f"{_FOLDER}/{name}.bin"]
    if stacks := stacks_of(module.module):
        files.append(f"{_FOLDER}/{STACKS_FILE}")
        np.savez(folder / files[-1], **{name: stack.numpy() for name, stack in stacks.items()})
    return Artifact(
        backend="openvino",
        dtype=dtype,
        files=tuple(files),
        properties={PRECISION: _PRECISIONS[dtype]},
        pipeline_cores=conversion.parts,
        versions={
            "openvino": openvino.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )


def _convert(module: SourceModule, example: Mapping[str, torch.Tensor], path: Path) -> None:
    model = _from_onnx(module) if onnx_model(module.module) else _traced(module, example)
    inputs = [*module.inputs, *stacks_of(module.module)]
    if len(model.inputs) != len(inputs):
        names = [port.any_name for port in model.inputs]
        raise SetupError(f"{module.architecture} uses the inputs {names} of {inputs}, which is not supported")
    for port, name in zip([*model.inputs, *model.outputs], [*inputs, *module.outputs], strict=True):
        port.set_names({name})
    openvino.save_model(model, path, compress_to_fp16=False)


def _traced(module: SourceModule, example: Mapping[str, torch.Tensor]) -> openvino.Model:
    inputs, stacks = [], stacks_of(module.module)
    for name in module.inputs:
        free, array = module.free_axes(name), example[name].numpy()
        shape = openvino.PartialShape([-1 if axis in free else length for axis, length in enumerate(array.shape)])
        inputs.append((shape, openvino.Type(array.dtype)))
    # Stacks are inputs of any number of adapters and any rank, so that the file of weights has the base alone.
    inputs += [(openvino.PartialShape([-1] * stack.dim()), openvino.Type.f32) for stack in stacks.values()]
    with warnings.catch_warnings(), torch.inference_mode():
        # The tracer warns of every Python value that it treats as constant. In these models the values are constant, as
        # the comparison shows.
        warnings.simplefilter("ignore")
        problem = f"OpenVINO {openvino.__version__} cannot convert {module.architecture}"
        with refusing(problem, why=cause_of, advice="; --backend torch may compile it"):
            called = TakingStacks(module.module) if stacks else module.module
            positional = Positional(called, [*module.inputs, *stacks], module.outputs)
            return traced(positional, (*example.values(), *stacks.values()), input=inputs)


def _from_onnx(module: SourceModule) -> openvino.Model:
    """Converts an ONNX graph with the modules behind it. Raises SetupError."""
    whole = module.module
    model = onnx_model(whole)
    assert model is not None  # noqa: S101 (the caller checked it)
    with refusing(f"OpenVINO {openvino.__version__} cannot read {model.path}"):
        graph = engine().read_model(model.path)
    by_name = {name: port for port in graph.outputs for name in port.get_names()}
    parameters = {port.any_name: port.get_node() for port in graph.inputs}
    if isinstance(whole, Named):
        results = [by_name[model.output(name)].get_node().input_value(0) for name in whole.outputs.values()]
        return openvino.Model(results, [parameters[name] for name in module.inputs])
    assert isinstance(whole, PooledModule)  # noqa: S101 (the tasks use no other classes)
    hidden = by_name[model.output(HIDDEN)].get_node().input_value(0)
    width = hidden.get_partial_shape()[2].get_length()
    further = [name for name in module.inputs if name not in model.inputs]
    example = (torch.rand(2, 5, width), *(torch.ones(2, 5, dtype=torch.int64) for _ in range(1 + len(further))))
    shapes = [openvino.PartialShape([-1, -1, *tensor.shape[2:]]) for tensor in example]
    types = [openvino.Type(tensor.numpy().dtype) for tensor in example]
    head = convert_model(whole.head, example_input=example, input=list(zip(shapes, types, strict=True)))
    vectors, mask, *others = head.inputs
    for port, source in ((vectors, hidden), (mask, parameters["attention_mask"].output(0))):
        for target in port.get_target_inputs():
            target.replace_source_output(source)
    parameters |= dict(zip(further, (port.get_node() for port in others), strict=True))
    results = [head.outputs[0].get_node().input_value(0)]
    return openvino.Model(results, [parameters[name] for name in module.inputs])


def run(conversion: Conversion, artifact: Artifact, batches: Sequence[SampleBatch]) -> Ran:
    paths = [conversion.folder / name for name in artifact.files if name.endswith(".xml")]
    with refusing(f"OpenVINO {openvino.__version__} cannot compile {conversion.module.architecture}"):
        models = [with_stacks(engine().read_model(path), path) for path in paths]
        properties = computable(artifact.properties, models)
        parts = [engine().compile_model(model, "CPU", properties) for model in models]
    outputs: list[Outputs] = []
    for batch in batches:
        values = dict(batch)
        for part in parts:
            result = part({port.any_name: values[port.any_name] for port in part.inputs})
            values |= {port.any_name: result[port].copy() for port in part.outputs}
        outputs.append({name: values[name] for name in conversion.module.outputs})
    is_as_asked = properties[PRECISION] == artifact.properties[PRECISION]
    return Ran(outputs, artifact.dtype if is_as_asked else "float32")
