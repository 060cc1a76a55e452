"""Converts PyTorch to an exported program: graph and weights in one file.

The program runs without transformers and without the Hub.
"""

import copy
import warnings
from collections.abc import Sequence

import torch
import transformers

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.compiler.conversion import Conversion, Ran
from neuronpipe.compiler.modules import Outputs, SampleBatch
from neuronpipe.compiler.saved_files import cause_of, refusing

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = tuple(TORCH_DTYPES)
BUCKETS = "none"

_MODEL_FILE = "artifacts/torch/model.pt2"


def convert(conversion: Conversion) -> Artifact:
    """Exports the module with any batch and length; see ArtifactCompiler."""
    module = conversion.module
    converted = copy.deepcopy(module.module).to(TORCH_DTYPES[conversion.dtype]).eval()
    # Outputs are float32, also for models in other data types.
    converted.register_forward_hook(
        lambda _, _inputs, outputs: {name: tensor.float() for name, tensor in outputs.items()}
    )
    example = {name: torch.from_numpy(conversion.example[name]) for name in module.inputs}
    free = {name: dict.fromkeys(module.free_axes(name), torch.export.Dim.DYNAMIC) for name in module.inputs}
    problem = f"torch {torch.__version__} cannot export {module.architecture}"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with refusing(problem, why=cause_of):
            program = torch.export.export(converted, (), kwargs=example, dynamic_shapes=free, strict=False)
        path = conversion.folder / _MODEL_FILE
        path.parent.mkdir(parents=True)
        torch.export.save(program, path)
    return Artifact(
        backend="torch",
        dtype=conversion.dtype,
        files=(_MODEL_FILE,),
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )


def run(conversion: Conversion, artifact: Artifact, batches: Sequence[SampleBatch]) -> Ran:
    outputs: list[Outputs] = []
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        program = torch.export.load(conversion.folder / _MODEL_FILE).module()
        for batch in batches:
            result = program(**{name: torch.from_numpy(batch[name]) for name in conversion.module.inputs})
            outputs.append({name: tensor.numpy() for name, tensor in result.items()})
    return Ran(outputs, artifact.dtype)
