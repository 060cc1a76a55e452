"""Compiles a model that generates, and compares the code that serves it with transformers' `generate`.

For OpenVINO the executor makes a paged graph of the stateful graph when it loads it. That transformation silently
leaves out parts that it does not know (position biases), so a bundle is only written if `generate` chooses the same
tokens. A model with other tokens gets a graph that gathers the cache itself (decoder_graphs.py), which is slower.
"""

import copy
import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from neuronpipe.bundles.manifest import Accuracy, Artifact
from neuronpipe.compiler import accuracy, neuronx, quantization, slots
from neuronpipe.compiler.architectures import compute_by_expert, layer_windows, replacing
from neuronpipe.compiler.conversion import Conversion, Reporter, Steps
from neuronpipe.compiler.decoder_graphs import exported_programs, gathered_graphs, paged_graphs
from neuronpipe.compiler.detection import WITH_SHARED_BIASES
from neuronpipe.compiler.modules import SourceModule, pretrained_model
from neuronpipe.compiler.saved_files import cause_of
from neuronpipe.compiler.torch import TORCH_DTYPES
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ModelSpec
from neuronpipe.stages.neuron_executor.backends import load_decoder
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest
from neuronpipe.stages.neuron_executor.runtimes.decoder import GATHERED, MODEL, DecoderModel
from neuronpipe.stages.neuron_executor.runtimes.given_texts import (
    GivenText,
    computed_logits,
    largest_difference,
    largest_logit,
    token_agreement,
)
from neuronpipe.stages.neuron_executor.runtimes.openvino import PRECISION, computable, engine, openvino

# Back end → the data types in which it generates.
DTYPES = {"openvino": ("float32", "bfloat16", "int8-weights"), "torch": tuple(TORCH_DTYPES), "neuronx": neuronx.DTYPES}
# On some CPUs the cache is in 8 bits by default: then 6 of 24 texts were the same (measured 2026-11-22).
_PRECISIONS = (PRECISION, "KV_CACHE_PRECISION")
_PROMPT_WORDS = (1, 3, 8, 20, 50, 120)
# Another prompt is as long as the model takes, up to this number of tokens, because long texts show faults of length.
# For a model with a sliding window it is longer than the window, up to the second limit.
_LONG_TOKENS, _MOST_LONG_TOKENS = 1500, 4600
_BEYOND_WINDOW_TOKENS = 64
_NEW_TOKENS = 24
# Room for blocks that are not full.
_ROOM_TOKENS = 96
# The largest difference of a logit, as a share of the largest logit.
_MOST_DIFFERENCE = 1e-3
# The smallest share of equal tokens in a data type other than float32, if the request has no limit.
_LEAST_AGREEMENT = 0.9


def compile_decoder(
    backend: str,
    conversion: Conversion,
    spec: ModelSpec,
    texts: Sequence[GivenText],
    min_agreement: float | None,
    steps: Steps,
) -> tuple[Artifact, Accuracy]:
    """Writes the graphs into a bundle's folder, in the first form whose tokens equal the tokens of `generate`.

    `texts`, `min_agreement`: see compare. Raises SetupError if no form has equal tokens.
    """
    module, folder, dtype = conversion.module, conversion.folder, conversion.dtype
    if backend == "neuronx":
        return _compile_slots(conversion, texts, min_agreement, steps)
    is_paged = backend == "openvino" and module.config.model_type not in WITH_SHARED_BIASES
    if dtype == "bfloat16" and module.config.is_encoder_decoder:
        is_paged = False  # the paged cache is then bfloat16, and NumPy, which writes sources, has no bfloat16
    problem: SetupError | None = None
    for form in (MODEL, GATHERED) if is_paged else (GATHERED,):
        begin: Reporter = (lambda line: None) if problem else steps.begin  # a second form takes the same steps
        try:
            begin(f"convert for {backend}, {dtype}")
            artifact = _convert(module, folder, form, backend, dtype)
            if dtype == "int8-weights":
                begin("quantize the weights to int8")
                artifact = quantization.compress(artifact, folder)
            begin("compare with generate on samples")
            load, computed_dtype = partial(_load, artifact, spec, folder), _computed_dtype(artifact, folder)
            measured = compare(
                module=module,
                texts=texts,
                artifact=artifact,
                computed_dtype=computed_dtype,
                load=load,
                min_agreement=min_agreement,
            )
            break
        except Exception as error:  # a graph may not load or run, or may compute something else
            reason = cause_of(error)
            problem = error if isinstance(error, SetupError) else _refusal(module, reason)
            problem.__cause__ = problem.__cause__ or error
            shutil.rmtree(folder / "artifacts", ignore_errors=True)
    else:
        assert problem  # noqa: S101 (each form had a problem; the last decides)
        raise problem
    if backend == "openvino" and form == GATHERED:
        reason = "OpenVINO's paged attention cannot compute it"
        steps.report(f"      {reason}; the graph gathers its cache itself, which is slower")
    return artifact, measured


def _load(artifact: Artifact, spec: ModelSpec, folder: Path, tokens: int) -> DecoderModel:
    request = BackendRequest(spec, [folder / file for file in artifact.files], artifact.properties, cores=0, threads=0)
    try:
        return load_decoder(artifact.backend, request, max_tokens=tokens, max_bytes=1 << 40)
    except SetupError as error:  # with advice for a bundle, which does not exist yet
        reason = cause_of(error)
        raise RuntimeError(f"{artifact.backend} does not load its graph: {reason}") from error


def _computed_dtype(artifact: Artifact, folder: Path) -> str:
    """Returns the data type in which this CPU computes the graphs of an artefact."""
    if artifact.backend != "openvino" or artifact.dtype != "bfloat16":
        return artifact.dtype
    graphs = [engine().read_model(folder / file) for file in artifact.files if file.endswith(".xml")]
    used = computable(artifact.properties, graphs)
    return artifact.dtype if used[PRECISION] == artifact.properties[PRECISION] else "float32"


def _refusal(module: SourceModule, problem: str) -> SetupError:
    return SetupError(f"{module.architecture} cannot be compiled for {module.task.replace('_', ' ')}: {problem}")


def _compile_slots(
    conversion: Conversion, texts: Sequence[GivenText], min_agreement: float | None, steps: Steps
) -> tuple[Artifact, Accuracy]:
    """Compiles for Neuron. PyTorch, which needs no device, is compared before the trace, which takes long."""
    module, (bucket, *others) = conversion.module, conversion.buckets
    if others:
        problem = "what generates has one, SLOTSxTOKENS, since its traces would not share their cache"
        raise SetupError(f"--bucket: {problem}; here are {len(conversion.buckets)}")
    beams = module.fact("num_beams") or 1
    needed = beams + 1 if module.config.is_encoder_decoder else 1
    if bucket.batch < needed:
        raise SetupError(
            f"--bucket {bucket}: a text of {module.architecture} takes {needed} slots, {beams} for its beams and one "
            f"for its source: write {needed}x{bucket.tokens} or more"
        )
    steps.begin("compare with generate on samples")
    described = Artifact(backend="neuronx", dtype=conversion.dtype, files=())
    emulated = slots.emulated(module, bucket, conversion.dtype)
    measured = compare(
        module=module,
        texts=texts,
        artifact=described,
        computed_dtype=conversion.dtype,
        load=lambda _: emulated,
        min_agreement=min_agreement,
    )
    steps.begin(f"convert for neuronx, {conversion.dtype}")
    return neuronx.convert(conversion), measured.model_copy(update={"emulator": "PyTorch instead of a Neuron device"})


def _convert(module: SourceModule, folder: Path, form: str, backend: str, dtype: str) -> Artifact:
    model = pretrained_model(module.module)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    artifacts = folder / "artifacts" / backend
    try:
        # Only eager attention computes capped scores.
        is_capped = getattr(model.config, "attn_logit_softcapping", None) is not None
        model.set_attn_implementation("eager" if is_capped else "sdpa")
        if backend == "torch":
            programs = exported_programs(copy.deepcopy(model).to(TORCH_DTYPES[dtype]))
        else:
            compute_by_expert(model)
            graphs = gathered_graphs(model) if form == GATHERED else paged_graphs(model)
    except Exception as error:  # the tracers, the model's own code and OpenVINO raise different exceptions
        version = f"torch {torch.__version__}" if backend == "torch" else f"OpenVINO {openvino.__version__}"
        other = "openvino" if backend == "torch" else "torch"
        # PyTorch, which has no other form, refuses the models that the gathered form refuses (ValueError).
        is_refused = backend == "openvino" and form == GATHERED and isinstance(error, ValueError)
        reason = cause_of(error) + ("" if is_refused else f"; --backend {other} may")
        raise _refusal(module, f"{version} makes no graph of it with a cache in blocks: {reason}") from error
    artifacts.mkdir(parents=True)
    if backend == "torch":
        for name, program in programs.items():
            torch.export.save(program, artifacts / f"{name}.pt2")
        files = tuple(f"artifacts/torch/{name}.pt2" for name in programs)
        return Artifact(backend="torch", dtype=dtype, files=files, versions=versions)
    for name, graph in graphs.items():
        openvino.save_model(graph, artifacts / f"{name}.xml", compress_to_fp16=False)
    return Artifact(
        backend="openvino",
        dtype=dtype,
        files=tuple(f"artifacts/openvino/{name}.{kind}" for name in graphs for kind in ("xml", "bin")),
        properties=dict.fromkeys(_PRECISIONS, "bf16" if dtype == "bfloat16" else "f32"),
        versions=versions | {"openvino": openvino.__version__},
    )


def sample_texts(module: SourceModule) -> list[GivenText]:
    """Returns sample prompts, and the tokens that `generate` adds to them in float32, greedy."""
    start = list(module.fact("decoder_start_token_ids"))
    max_tokens = module.max_tokens if start else module.max_tokens - _NEW_TOKENS - 1
    window = 0 if module.config.is_encoder_decoder else max(layer_windows(module.config))
    longest = min(max_tokens, max(_LONG_TOKENS, window + _BEYOND_WINDOW_TOKENS), _MOST_LONG_TOKENS)
    inputs = [ids[:longest] for ids in accuracy.sample_prompts(module, (*_PROMPT_WORDS, longest))]
    if len(inputs[-2]) == longest:
        del inputs[-1]
    room = module.fact("max_text_tokens") or module.max_tokens - max(map(len, inputs)) - 1
    new_tokens = max(1, min(_NEW_TOKENS, room))
    return [
        GivenText(start or ids, ids if start else [], *_reference(module, ids, start, new_tokens)) for ids in inputs
    ]


def compare(
    module: SourceModule,
    texts: Sequence[GivenText],
    artifact: Artifact,
    computed_dtype: str,
    load: Callable[[int], DecoderModel],
    min_agreement: float | None,
) -> Accuracy:
    """Compares the tokens and logits of texts with the results of `generate`; see sample_texts.

    `computed_dtype`: the data type in which this machine computes the artefact. `load`: returns the model with a cache
    for a number of tokens, or for fewer if the size of the cache is fixed. Raises SetupError in float32 for a
    difference that is not a tie. In other data types, raises it if less than `min_agreement` of the tokens are equal,
    each after the tokens of `generate` (default: _LEAST_AGREEMENT).
    """
    lengths = [len(text.source or text.prompt) + len(text.tokens) for text in texts]
    computed = computed_logits(load(sum(lengths) + _ROOM_TOKENS * len(texts)), texts)
    largest, difference = largest_logit(texts), largest_difference(computed, texts)
    agreement, tokens = token_agreement(computed, texts)
    if artifact.dtype == "float32" and (agreement < 1 or not difference <= _MOST_DIFFERENCE * largest):
        differing = f"{round(tokens * (1 - agreement))} of {tokens} tokens differ from transformers' generate"
        raise _refusal(module, f"with a cache in blocks, {differing}, and logits by up to {difference:.2e}")
    emulated = None if computed_dtype == artifact.dtype else _emulated(module, texts)
    measured = Accuracy(
        samples=len(texts),
        sample_texts="built-in sample text",
        sample_shapes=tuple((1, length) for length in lengths),
        largest_output=largest,
        largest_difference=difference,
        computed_dtype=computed_dtype,
        agreement=agreement,
        emulated_difference=emulated and largest_difference(emulated, texts),
        emulated_agreement=emulated and token_agreement(emulated, texts)[0],
    )
    if artifact.dtype != "float32":
        accuracy.check(measured, None, _LEAST_AGREEMENT if min_agreement is None else min_agreement)
    return measured


def _emulated(module: SourceModule, texts: Sequence[GivenText]) -> list[NDArray[np.float32]]:
    """Computes the logits of PyTorch in bfloat16, [tokens, vocabulary] for each text."""
    model, all_logits = pretrained_model(module.module), []
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        for text in texts:
            whole = torch.tensor([[*text.prompt, *text.tokens[:-1].tolist()]])
            name = "decoder_input_ids" if text.source else "input_ids"
            source = {"input_ids": torch.tensor([[*text.source]])} if text.source else {}
            logits = model(**source, **{name: whole})["logits"][0, len(text.prompt) - 1 :]
            all_logits.append(logits.float().numpy())
    return all_logits


def _reference(
    module: SourceModule, ids: Sequence[int], start: Sequence[int], new_tokens: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Returns the tokens that `generate` adds, and their logits, [tokens, vocabulary]."""
    model = pretrained_model(module.module)
    config = transformers.GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        decoder_start_token_id=start[0] if start else None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    prompt = torch.tensor([list(ids)])
    # The model's own values would fill unset options.
    with replacing((model, "generation_config", config)), torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    logits = torch.cat(result.logits).float().numpy()
    if not np.isfinite(logits).all():
        raise accuracy.damaged(module)
    return result.sequences[0, -len(logits) :].numpy(), logits
