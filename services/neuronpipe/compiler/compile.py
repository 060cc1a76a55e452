"""Compiles the folder of a model into a bundle, step by step."""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.bundles.buckets import Bucket, BucketPlan
from neuronpipe.bundles.manifest import SCHEMA_VERSION, Accuracy, Artifact, Manifest
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.bundles.writing import check_writable, choose_version, new_bundle, write_manifest
from neuronpipe.compiler import accuracy, decoders, fake, neuronx, openvino, quantization
from neuronpipe.compiler import torch as torch_
from neuronpipe.compiler.accuracy import CalibrationTexts
from neuronpipe.compiler.adapters import merge_adapter
from neuronpipe.compiler.buckets import NO_BUCKETS, BucketRequest, choose_buckets
from neuronpipe.compiler.conversion import (
    DEFAULT_OPTIONS,
    ArtifactCompiler,
    Conversion,
    NeuronxOptions,
    Reporter,
    Steps,
)
from neuronpipe.compiler.detection import Configuration, DetectedTask, describe, read_configuration
from neuronpipe.compiler.modules import Outputs, SampleBatch, SourceModule
from neuronpipe.compiler.onnx import graph_file
from neuronpipe.compiler.own_code import KNOWN_FORM, in_known_form
from neuronpipe.compiler.pipeline_parallel import ONE_CORE, PipelineOptions, cut_module
from neuronpipe.compiler.quantization import EMBEDDING_TASKS, with_ranges
from neuronpipe.compiler.rerankers import NO_OPTIONS, RerankerOptions, with_options
from neuronpipe.compiler.saved_files import reason_of
from neuronpipe.compiler.saved_settings import check_settings
from neuronpipe.compiler.source import ModelSource, check_kind, find_source
from neuronpipe.compiler.tasks import SOURCE_TASKS, load_module
from neuronpipe.compiler.tokenizers import SourceTokenizer, serving_json, token_texts
from neuronpipe.compiler.unused_files import unused_files
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ModelSpec
from neuronpipe.stages.neuron_executor.backends import WITH_PARTS
from neuronpipe.stages.neuron_executor.runtimes.given_texts import GivenText
from neuronpipe.stages.neuron_executor.runtimes.parts import BALANCES
from neuronpipe.tasks import TASKS

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import SigningKey

COMPILERS: dict[str, ArtifactCompiler] = {"openvino": openvino, "fake": fake, "neuronx": neuronx, "torch": torch_}
TOKENIZER_FILE = "tokenizer.json"
TOKENS_FILE = "tokens.json"
_QUERY_WEIGHTS_FILE = "query_weights.json"
_MERGED = "merged"
_COMPARE = "compare with PyTorch on samples"
# The results of these tasks contain tokens of the vocabulary.
_TASKS_WITH_TOKENS = frozenset(("fill_mask", "sparse_embedding"))


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """The model to compile, and how.

    - `max_divergence`: the largest accepted absolute difference of an output from PyTorch float32. `min_agreement` (0
      to 1): the smallest accepted agreement (see Accuracy). None means no limit. int8 keeps layers in float32 until
      `min_agreement` is reached.
    - `calibration`: a file of texts or a folder of images for int8, or None for samples.
    - `task`, `dtype`: empty: found from the model's configuration.
    - `reranker`: the template and the answers of a decoder that ranks.
    - `merge_adapter`: the source is an adapter (LoRA), which is merged into `base_model`, or into the model that it
      names.
    - `adapters`: adapters that requests name, each NAME=FOLDER.
    - `signing_key`: signs the bundle.
    """

    source: str
    task: str
    repository: Path
    name: str
    version: int | None = None
    revision: str | None = None
    backend: str = "openvino"
    dtype: str = "float32"
    max_divergence: float | None = None
    min_agreement: float | None = None
    calibration: Path | None = None
    buckets: BucketRequest = NO_BUCKETS
    pipeline: PipelineOptions = ONE_CORE
    neuronx: NeuronxOptions = DEFAULT_OPTIONS
    reranker: RerankerOptions = NO_OPTIONS
    cache_results: bool = False
    merge_adapter: bool = False
    base_model: str = ""
    adapters: tuple[str, ...] = ()
    signing_key: "SigningKey | None" = None


@dataclass(frozen=True, slots=True)
class Compiled:
    """A bundle and its comparison: batches and the outputs of PyTorch, or `texts` for a model that generates."""

    bundle: Bundle
    batches: Sequence[SampleBatch]
    reference: Sequence[Outputs]
    texts: Sequence[GivenText] = ()


def compile_bundle(request: CompileRequest, report: Reporter) -> Bundle:
    """Compiles a model and adds it to the repository, completely or not at all. Raises SetupError."""
    return compile_with_reference(request, report).bundle


def compile_with_reference(request: CompileRequest, report: Reporter) -> Compiled:
    """Compiles a model as compile_bundle does, and returns the bundle with its comparison."""
    steps = Steps(7 if request.dtype.startswith("int8") else 6, report)
    with tempfile.TemporaryDirectory(prefix="neuronpipe-") as scratch:
        try:
            return _compile(request, Path(scratch), steps)
        except ModuleNotFoundError:  # the command says how to install the package
            raise
        except Exception as error:  # a refusal, or any error of a library about the model's files
            problem = str(error)
            if not isinstance(error, SetupError):
                description = f"{type(error).__name__}: {reason_of(error)}"
                problem = f"{request.source}: cannot be compiled: the step {steps.current!r} failed: {description}"
            for folder in (KNOWN_FORM, _MERGED):  # the source, with links or with an adapter's weights
                problem = problem.replace(f"{scratch}/{folder}", request.source)
            raise SetupError(problem) from error


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model that is loaded in PyTorch, with the request, whose task and dtype are known."""

    request: CompileRequest
    source: ModelSource
    module: SourceModule
    buckets: tuple[Bucket, ...]
    version: int
    steps: Steps

    def conversion(self, folder: Path, module: SourceModule, example: SampleBatch) -> Conversion:
        """Returns the conversion of the module, or of a form of it, into a bundle's folder, not cut into parts."""
        return Conversion(
            module=module,
            source=self.source,
            example=example,
            folder=folder,
            dtype=self.request.dtype,
            buckets=self.buckets,
            neuronx=self.request.neuronx,
            adapters=self.request.adapters,
        )


def _compile(request: CompileRequest, scratch: Path, steps: Steps) -> Compiled:
    _refuse(_refusals(request))
    check_writable(request.repository, request.name)
    calibration = accuracy.read_calibration(request.calibration) if request.calibration else None
    version = choose_version(request.repository, request.name, request.version)
    steps.begin(f"find {request.source}" + (", and merge it into its base model" if request.merge_adapter else ""))
    original = _find(request, scratch, steps.report)
    source = in_known_form(original, scratch)
    configuration = read_configuration(source.folder)
    detected, request = _with_task(request, configuration)
    _refuse(_refusals_of_task(request))
    if request.reranker != NO_OPTIONS:
        source = with_options(source, request.reranker, scratch)
    check_kind(source.folder, configuration.config, configuration.architecture, request.task)
    _refuse(_refusals_of_graph(request, source))
    notes = check_settings(source.folder, configuration.config, request.task)
    if unused := unused_files(original.folder, request.task, original.others):
        notes = [f"      {'not used':14}{', '.join(unused)}; the bundle has nothing of it", *notes]

    steps.begin("read the tokenizer, if it has one")
    tokenizer = SOURCE_TASKS[request.task].load_tokenizer(source.folder)

    steps.begin("load the model in PyTorch, float32")
    module = load_module(source.folder, request.task, tokenizer, adapters=request.adapters)
    if configuration.has_own_code:
        steps.report(f"      its own code (auto_map) is not run; {module.architecture} of transformers is")
    _refuse(_refusals_of_layers(request, module))
    steps.report("\n".join([describe(module, detected.reason, request.dtype, configuration.weights_dtype), *notes]))
    if buckets := _choose_buckets(request, module, steps.report):
        module = module.within(BucketPlan(buckets))
    steps.current = "run the model in PyTorch on samples"
    loaded = _Loaded(request, source, module, buckets, version, steps)
    return _compile_decoder(loaded) if TASKS[request.task].generates else _compile_graph(loaded, calibration)


def _find(request: CompileRequest, scratch: Path, report: Reporter) -> ModelSource:
    if not request.merge_adapter:
        return find_source(request.source, request.revision)
    source = merge_adapter(request.source, request.revision, request.base_model, scratch / _MERGED)
    report(f"      merged into {source.base}")
    return source


def _with_task(request: CompileRequest, configuration: Configuration) -> tuple[DetectedTask, CompileRequest]:
    """Returns a request with the task and the dtype that the model's configuration says, unless it names them."""
    if request.task:
        configuration.check_task(request.task)
    detected = DetectedTask(request.task, "chosen") if request.task else configuration.find_task()
    dtypes = COMPILERS[request.backend].DTYPES
    default = "float32" if TASKS[detected.task].generates else configuration.dtype_of(dtypes)
    return detected, dataclasses.replace(request, task=detected.task, dtype=request.dtype or default)


def _compile_graph(loaded: _Loaded, calibration: CalibrationTexts | None) -> Compiled:
    """Compiles a model whose outputs are compared with the outputs of PyTorch on samples."""
    request, module, steps = loaded.request, loaded.module, loaded.steps
    if request.dtype == "int8" and calibration is None:
        calibration = accuracy.built_in_calibration(of_images=module.takes_images)
    batches = accuracy.comparison_batches(module, calibration.compared if calibration else ())
    reference = accuracy.reference_outputs(module, batches)
    accuracy.check_padding(module, batches, reference)
    module = with_ranges(module, reference)
    spec = module.spec(request.name, loaded.version, reference[0])
    with new_bundle(request.repository, request.name, loaded.version) as folder:
        steps.begin(f"convert for {request.backend}, {request.dtype}")
        _write_tokenizer(folder, module.tokenizer, module.fact("mask_token") or "", spec)
        conversion = loaded.conversion(folder, module, batches[0])
        if pipeline := cut_module(module, batches[0], request.pipeline):
            steps.report(pipeline.describe())
            conversion = dataclasses.replace(conversion, pipeline=pipeline)
        artifact = COMPILERS[request.backend].convert(conversion)
        measure = partial(
            accuracy.measure,
            COMPILERS[request.backend],
            conversion,
            batches=batches,
            reference=reference,
            sample_texts=_describe_samples(request, module, calibration),
        )
        if request.dtype == "int8" and calibration:
            artifact, measured = _quantize(loaded, conversion, artifact, calibration, measure)
        else:
            if request.dtype == "int8-weights":
                steps.begin("quantize the weights to int8")
                artifact = quantization.compress(artifact, folder)
            steps.begin(_COMPARE)
            measured = measure(artifact)
        _complete(loaded, folder, spec, artifact, measured)
    return Compiled(read_bundle(request.repository / request.name / str(loaded.version)), batches, reference)


def _quantize(
    loaded: _Loaded,
    conversion: Conversion,
    artifact: Artifact,
    calibration: CalibrationTexts,
    measure: Callable[[Artifact], Accuracy | None],
) -> tuple[Artifact, Accuracy | None]:
    """Returns the model in int8 and its accuracy; with parts in float32 if it agrees too little without."""
    described, texts = calibration.description, accuracy.calibration_batches(conversion.module, calibration.texts)
    kind = "images" if loaded.module.takes_images else "texts"
    steps = loaded.steps
    steps.begin(f"quantize to int8, calibrated on {described.texts} {kind} ({described.source})")
    quantizer = quantization.Quantizer(artifact, conversion.folder, texts, described)
    artifact = quantizer.quantize()
    steps.begin(_COMPARE)
    measured, wanted = measure(artifact), loaded.request.min_agreement
    if wanted is not None and not accuracy.agrees(measured, wanted):
        steps.report(f"      int8 agrees less than --min-agreement {wanted:g}; find the parts that lose most")
        ranked = quantization.rank(quantizer, COMPILERS[loaded.request.backend], conversion, texts)
        artifact, measured = quantization.search(quantizer, ranked, measure, wanted)
        float_parts = artifact.float_parts
        steps.report(f"      {len(float_parts)} of {len(ranked)} in float32: {', '.join(float_parts)}")
    return artifact, measured


def _describe_samples(request: CompileRequest, module: SourceModule, calibration: CalibrationTexts | None) -> str:
    built_in, kind = (accuracy.BUILT_IN_IMAGES, "images") if module.takes_images else (accuracy.BUILT_IN, "texts")
    compared = calibration.compared if calibration else ()
    return f"{len(compared)} other {kind} of {request.calibration}" if compared else built_in


def _compile_decoder(loaded: _Loaded) -> Compiled:
    """Compiles a model whose texts are compared with the texts of PyTorch."""
    request, module = loaded.request, loaded.module
    texts = decoders.sample_texts(module)
    with new_bundle(request.repository, request.name, loaded.version) as folder:
        spec = dataclasses.replace(module, inputs=("input_ids",)).spec(request.name, loaded.version, {})
        _write_tokenizer(folder, module.tokenizer, "", spec)
        conversion = loaded.conversion(folder, module, {})
        artifact, measured = decoders.compile_decoder(
            request.backend, conversion, spec, texts, request.min_agreement, loaded.steps
        )
        _complete(loaded, folder, spec, artifact, measured)
    return Compiled(read_bundle(request.repository / request.name / str(loaded.version)), (), (), texts)


def _complete(loaded: _Loaded, folder: Path, spec: ModelSpec, artifact: Artifact, measured: Accuracy | None) -> None:
    """Checks the accuracy, writes the manifest of a bundle whose files are there, and signs the bundle if there is a
    key.
    """
    request = loaded.request
    if measured is not None:
        loaded.steps.report(accuracy.describe(measured, request.dtype, request.task))
    accuracy.check(measured, request.max_divergence, request.min_agreement)
    loaded.steps.begin("write the bundle")
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        model=spec,
        source=loaded.source.describe(),
        tokenizer_file=TOKENIZER_FILE if (folder / TOKENIZER_FILE).exists() else "",
        tokens_file=TOKENS_FILE if (folder / TOKENS_FILE).exists() else "",
        query_weights_file=_QUERY_WEIGHTS_FILE if spec.query_weights else "",
        artifacts=(artifact.model_copy(update={"accuracy": measured}),),
        cache_results=request.cache_results,
        files={},
    )
    write_manifest(folder, manifest)
    if request.signing_key:
        from neuronpipe.bundles.signing import write_signature

        write_signature(folder, request.signing_key)


def _write_tokenizer(folder: Path, tokenizer: SourceTokenizer, mask_token: str, spec: ModelSpec) -> None:
    if tokenizer.json:
        (folder / TOKENIZER_FILE).write_text(serving_json(tokenizer, mask_token), encoding="utf-8")
    if not _TASKS_WITH_TOKENS.isdisjoint(spec.tasks):
        tokens = token_texts(tokenizer, spec.vocabulary_size, are_unique="sparse_embedding" in spec.tasks)
        (folder / TOKENS_FILE).write_text(json.dumps(tokens, ensure_ascii=False), encoding="utf-8")
    if spec.query_weights:
        (folder / _QUERY_WEIGHTS_FILE).write_text(json.dumps(spec.query_weights))


def _refuse(refusals: Iterator[str]) -> None:
    if refusal := next(refusals, None):
        raise SetupError(refusal)


def _refusals(request: CompileRequest) -> Iterator[str]:
    """Yields the faults of a request, before its model is read."""
    if request.task and request.task not in SOURCE_TASKS:
        yield f"task {request.task!r} is not known; there are: {', '.join(SOURCE_TASKS)}"
    backend, dtype = request.backend, request.dtype
    if backend not in COMPILERS:
        yield f"back end {backend!r} is not known; there are: {', '.join(COMPILERS)}"
    dtypes, buckets = COMPILERS[backend].DTYPES, COMPILERS[backend].BUCKETS
    if dtype and dtype not in dtypes:
        yield f"dtype {dtype!r} is not known for {backend}; there are: {', '.join(dtypes)}"
    if buckets == "required" and not request.buckets.buckets:
        yield (
            f"{backend} computes only the shapes that it was compiled for; name them with --bucket BATCHxTOKENS, or "
            "have them chosen with --buckets auto --lengths FILE"
        )
    if buckets == "none" and request.buckets.buckets:
        yield f"{backend} computes any shape; leave out --bucket and --buckets"
    request.buckets.check()
    if backend != "neuronx" and dataclasses.replace(request.neuronx, cache=DEFAULT_OPTIONS.cache) != DEFAULT_OPTIONS:
        yield (
            "--target, --optlevel, --model-type, --auto-cast, --attention and --compile-workers are for "
            "--backend neuronx"
        )
    yield from _refusals_of_pipeline(request)
    if request.base_model and not request.merge_adapter:
        yield "--base-model is for --merge-adapter"
    yield from _refusals_of_adapters(request)
    if request.max_divergence is not None and not request.max_divergence >= 0:  # also false for NaN
        yield f"--max-divergence {request.max_divergence}: must be 0 or more"
    if request.min_agreement is not None and not 0 < request.min_agreement <= 1:
        yield f"--min-agreement {request.min_agreement}: must be more than 0 and at most 1"
    if request.version is not None and request.version < 1:
        yield f"version {request.version}: versions are whole numbers from 1 on"
    if request.task and dtype:
        yield from _refusals_of_calibration(request)


def _refusals_of_pipeline(request: CompileRequest) -> Iterator[str]:
    cores, balance = request.pipeline.cores, request.pipeline.balance
    if request.pipeline == ONE_CORE:
        return
    if cores < 1 or balance not in BALANCES:
        yield (f"--pipeline-cores {cores} --pipeline-balance {balance}: 1 core or more, and {' or '.join(BALANCES)}")
    if cores == 1:
        yield f"--pipeline-balance {balance}: is for --pipeline-cores of 2 or more"
    if request.backend not in WITH_PARTS:
        yield (
            f"--pipeline-cores: the back end {request.backend!r} computes a model on one core; "
            f"{' and '.join(WITH_PARTS)} have models over several"
        )
    if request.dtype.startswith("int8"):
        yield f"--pipeline-cores: not with --dtype {request.dtype}; float32 and bfloat16 can be cut"


def _refusals_of_adapters(request: CompileRequest) -> Iterator[str]:
    if not request.adapters:
        return
    if request.merge_adapter:
        yield "--adapter: not with --merge-adapter, whose SOURCE is the adapter; SOURCE of --adapter is the base"
    if request.pipeline.cores != 1:
        yield "--adapter: not with --pipeline-cores; a model with adapters is computed by one core"
    if request.backend == "fake" or request.dtype == "int8":
        chosen = "--backend fake" if request.backend == "fake" else "--dtype int8"
        yield f"--adapter: not with {chosen}; openvino, torch and neuronx take it, in the other data types"


def _refusals_of_calibration(request: CompileRequest) -> Iterator[str]:
    if request.calibration and request.dtype != "int8" and request.task not in EMBEDDING_TASKS:
        yield f"--calibration is for --dtype int8; {request.dtype} needs none, except for {', '.join(EMBEDDING_TASKS)}"


def _refusals_of_task(request: CompileRequest) -> Iterator[str]:
    """Yields the faults of a request whose task and dtype are known."""
    backend, dtype, reads = request.backend, request.dtype, TASKS[request.task].reads
    if request.reranker != NO_OPTIONS and request.task != "rerank":
        yield f"--rerank-template, --rerank-instruction and --rerank-answers are for --task rerank, not {request.task}"
    if TASKS[request.task].generates:
        dtypes = decoders.DTYPES.get(backend)
        if dtypes is None:
            yield f"--backend {backend}: does not generate text; {', '.join(decoders.DTYPES)} do"
        elif dtype not in dtypes:
            yield f"--dtype {dtype}: what generates text is compiled for {backend} in {', '.join(dtypes)}"
        if request.cache_results:
            yield "--cache-results: generated texts are not cached"
        if request.pipeline.cores != 1:
            yield "--pipeline-cores: what generates text is computed by one core"
    if reads == "both" and backend in ("fake", "neuronx"):
        yield f"--backend {backend} takes texts or images; openvino and torch take both together"
    if reads == "both" and dtype == "int8":
        yield "--dtype int8 is for models of texts or of images; both together take any other --dtype"
    if request.calibration and request.calibration.is_dir() != (reads == "images"):
        wanted = "a folder of images" if reads == "images" else "a file of texts"
        yield f"--calibration {request.calibration}: a model of {reads} is calibrated on {wanted}"
    yield from _refusals_of_calibration(request)


def _refusals_of_graph(request: CompileRequest, source: ModelSource) -> Iterator[str]:
    """Yields the faults of a request for a model with an ONNX graph instead of weights."""
    if (graph := graph_file(source.folder)) is None:
        return
    only = f"{request.source}: has no weights of PyTorch, only the graph {graph.name}"
    if request.backend != "openvino":
        yield f"{only}, which the back end openvino takes; leave out --backend {request.backend}"
    if request.pipeline.cores != 1:
        yield f"{only}, which is not cut into parts; leave out --pipeline-cores"


def _refusals_of_layers(request: CompileRequest, module: SourceModule) -> Iterator[str]:
    if module.is_recurrent and request.backend in ("torch", "neuronx"):
        yield (
            f"{request.source}: has a recurrent layer (LSTM), which --backend {request.backend} cannot compile for "
            "texts of several lengths; use --backend openvino, or a model without one (num_rnn_layers 0)"
        )


def _choose_buckets(request: CompileRequest, module: SourceModule, report: Reporter) -> tuple[Bucket, ...]:
    if not request.buckets.buckets:
        return ()
    buckets, plan = choose_buckets(request.buckets, module.max_tokens)
    for bucket in buckets:
        if module.takes_images and bucket.tokens != module.max_tokens:
            problem = f"an image counts as {module.max_tokens} tokens: write {bucket.batch}x{module.max_tokens}"
            raise SetupError(f"--bucket {bucket}: {problem}")
    if plan is not None:
        report(plan.describe())
    return buckets
