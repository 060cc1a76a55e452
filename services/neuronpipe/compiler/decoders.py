"""Compiles a model that generates: for OpenVINO stateful graphs, compared with transformers' `generate` as it will run.

The executor makes the graph a paged one when it loads it. That transformation leaves out silently what it does not know
(position biases), so a bundle is only written if every token is the one that `generate` chooses. A
model for which it is not gets a graph that gathers the cache itself (gathered.py), which is slower.
"""

import copy
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache

from neuronpipe.bundles.manifest import Accuracy, Artifact
from neuronpipe.compiler import gathered, neuronx, quantization, slots, stateful
from neuronpipe.compiler.architectures import layer_windows, masks_by_kind
from neuronpipe.compiler.conversion import Conversion
from neuronpipe.compiler.decoder_accuracy import compare, shown
from neuronpipe.compiler.detection import WITH_SHARED_BIASES
from neuronpipe.compiler.modules import SourceModule, pretrained_model
from neuronpipe.compiler.stateful import arrays_of, cache_of, causal_mask, shapes_of, traced
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.decoder import GATHERED, MODEL, DecoderModel
from neuronpipe.stages.neuron_executor.runtimes.decoders import load
from neuronpipe.stages.neuron_executor.runtimes.given_texts import GivenText
from neuronpipe.stages.neuron_executor.runtimes.openvino import openvino
from neuronpipe.stages.neuron_executor.runtimes.paged import set_windows

# Back end → the data types that it generates in.
DTYPES = {
    "openvino": ("float32", "bfloat16", "int8-weights"),
    "torch": ("float32", "bfloat16", "float16"),
    "neuronx": neuronx.DTYPES,
}
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A cache in 8 bits is a default on some CPUs: 6 of 24 texts were then the same (measured 2026-11-22).
_PRECISIONS = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")


class _Step(torch.nn.Module):
    """A decoder as a function of its tokens and its cache, with scores for some rows only.

    In the stateful graph a row is a sequence. In the paged one it is a token, so that `scored_rows`, int64 [scored],
    chooses the tokens of which logits are computed.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        scored_rows: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        cache = cache_of([array.index_select(0, beam_idx) for array in past])
        mask: Any = causal_mask(attention_mask, input_ids.shape[1])
        # Of windows the paged graph gets to know otherwise; see _graph.
        mask = masks_by_kind(self.model.config, dict.fromkeys(layer_windows(self.model.config), mask))

        def choose(module: torch.nn.Module, args: Any, output: Any) -> Any:
            output["last_hidden_state"] = output["last_hidden_state"].index_select(0, scored_rows)
            return output

        handle = self.model.base_model.register_forward_hook(choose)
        try:
            result = self.model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
            )
        finally:
            handle.remove()
        return (result["logits"][:, -1], *arrays_of(cache))


def compile_decoder(
    backend: str,
    conversion: Conversion,
    texts: Sequence[GivenText],
    min_agreement: float | None,
    step: Callable[[str], None],
    report: Callable[[str], None],
) -> tuple[Artifact, Accuracy]:
    """Writes the graphs into a bundle's folder, in the first form that chooses the tokens of `generate`.

    `texts`, `min_agreement`: see decoder_accuracy.py. `step` is told of the two steps, `report` of a form that is
    slower than the other. Raises SetupError if no form does.
    """
    module, folder, dtype = conversion.module, conversion.folder, conversion.dtype
    if backend == "neuronx":
        return _compile_slots(conversion, texts, min_agreement, step)
    is_paged = backend == "openvino" and module.config.model_type not in WITH_SHARED_BIASES
    if dtype == "bfloat16" and module.config.is_encoder_decoder:
        is_paged = False  # a paged cache is then in bfloat16, which NumPy, by which sources are written, does not have
    problem: SetupError | None = None
    for form in (MODEL, GATHERED) if is_paged else (GATHERED,):
        try:
            if problem is None:
                step(f"convert for {backend}, {dtype}")
            artifact = _convert(module, folder, form, backend, dtype)
            if dtype == "int8-weights":
                if problem is None:
                    step("quantize the weights to int8")
                artifact = quantization.compress(artifact, folder)
            if problem is None:
                step("compare with generate on samples")
            measured = compare(module, texts, artifact, partial(_load, artifact, folder), min_agreement)
            break
        except SetupError as error:
            problem = problem or error
            shutil.rmtree(folder / "artifacts", ignore_errors=True)
    else:
        assert problem  # noqa: S101 (each form had one)
        raise problem
    if backend == "openvino" and form == GATHERED:
        report(
            "      OpenVINO's paged attention cannot compute it; the graph gathers its cache itself, which is slower"
        )
    return artifact, measured


def _load(artifact: Artifact, folder: Path, tokens: int) -> DecoderModel:
    return load(
        artifact.backend,
        folder / artifact.files[0],
        artifact.properties,
        threads=0,
        max_tokens=tokens,
        max_bytes=1 << 40,
    )


def _compile_slots(
    conversion: Conversion, texts: Sequence[GivenText], min_agreement: float | None, step: Callable[[str], None]
) -> tuple[Artifact, Accuracy]:
    """For Neuron. It is compared before it is traced, since that takes long, and by PyTorch, which needs no device."""
    module, (bucket, *others) = conversion.module, conversion.buckets
    if others:
        raise SetupError(
            f"--bucket: what generates has one, SLOTSxTOKENS, since its traces would not share their cache; "
            f"here are {len(conversion.buckets)}"
        )
    beams = module.fact("num_beams") or 1
    needed = beams + 1 if module.config.is_encoder_decoder else 1
    if bucket.batch < needed:
        raise SetupError(
            f"--bucket {bucket}: a text of {module.architecture} takes {needed} slots, {beams} for its beams and one "
            f"for its source: write {needed}x{bucket.tokens} or more"
        )
    step("compare with generate on samples")
    described = Artifact(backend="neuronx", dtype=conversion.dtype, files=())
    emulated = slots.emulated(module, bucket, conversion.dtype)
    measured = compare(module, texts, described, lambda _: emulated, min_agreement)
    step(f"convert for neuronx, {conversion.dtype}")
    return neuronx.convert(conversion), measured.model_copy(update={"emulator": "PyTorch in place of a Neuron device"})


def _convert(module: SourceModule, folder: Path, form: str, backend: str, dtype: str) -> Artifact:
    model = pretrained_model(module.module)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    own = folder / "artifacts" / backend
    try:
        # Capped scores are computed by eager attention only.
        is_capped = getattr(model.config, "attn_logit_softcapping", None) is not None
        model.set_attn_implementation("eager" if is_capped else "sdpa")
        if backend == "torch":
            programs = gathered.programs(copy.deepcopy(model).to(_TORCH_DTYPES[dtype]))
        else:
            graphs = gathered.graphs(model) if form == GATHERED else _paged_graphs(model)
    except Exception as error:  # the tracers, the model's own code and OpenVINO raise different exceptions
        version = f"torch {torch.__version__}" if backend == "torch" else f"OpenVINO {openvino.__version__}"
        raise SetupError(
            f"{module.architecture} cannot be compiled for {shown(module)}: {version} finds no attention in it that "
            "can have a cache in blocks"
        ) from error
    own.mkdir(parents=True)
    if backend == "torch":
        for name, program in programs.items():
            torch.export.save(program, own / f"{name}.pt2")
        files = tuple(f"artifacts/torch/{name}.pt2" for name in programs)
        return Artifact(backend="torch", dtype=dtype, files=files, versions=versions)
    for name, graph in graphs.items():
        openvino.save_model(graph, own / f"{name}.xml", compress_to_fp16=False)
    return Artifact(
        backend="openvino",
        dtype=dtype,
        files=tuple(f"artifacts/openvino/{name}.{kind}" for name in graphs for kind in ("xml", "bin")),
        properties=dict.fromkeys(_PRECISIONS, "bf16" if dtype == "bfloat16" else "f32"),
        versions=versions | {"openvino": openvino.__version__},
    )


def _paged_graphs(model: Any) -> dict[str, Any]:
    return stateful.graphs(model) if model.config.is_encoder_decoder else {MODEL: _graph(model)}


def _graph(model: Any) -> Any:
    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([[0, 0]]), past_key_values=cache, use_cache=True)
    graph = traced(_Step(model), shapes_of(cache))
    set_windows(graph, layer_windows(model.config))
    return graph
