"""The names that telemetry uses. Defined only here; docs/telemetry.md is made from them.

A span, an attribute or an event is a `Name`: a string with a description. A metric is an `Instrument`.
"""

from dataclasses import dataclass
from typing import Literal

# Keys of gRPC's metadata for W3C Trace Context, https://www.w3.org/TR/trace-context/.
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
# The tenant on whose behalf a caller calls, if it has the right to, as workers of jobs have.
ON_BEHALF = "neuronpipe-tenant"
# Requests with the same key get the same version of a model whose requests are distributed over versions.
ROUTE_KEY = "neuronpipe-route-key"


class Name(str):
    """A name with its description."""

    __slots__ = ("text",)

    text: str

    def __new__(cls, word: str, text: str) -> "Name":
        """Makes a name with its description."""
        name = super().__new__(cls, word)
        name.text = text
        return name


class Spans:
    """Spans. A span of kind SERVER has the name of its rpc, as OpenTelemetry's conventions require."""

    INFER = Name("neuronpipe.api.v1.InferenceService/Infer", "SERVER, gateway: one request, as long as its `total_ns`")
    INFER_BATCH = Name("neuronpipe.api.v1.InferenceService/InferBatch", "SERVER, gateway: a call with many requests")
    INFER_STREAM = Name(
        "neuronpipe.api.v1.InferenceService/InferStream", "SERVER, gateway: one request of a stream, as `Infer`"
    )
    GENERATE = Name(
        "neuronpipe.api.v1.InferenceService/Generate", "SERVER, gateway: one request that generates, as `Infer`"
    )
    HTTP_REQUEST = Name(
        "http.request", "SERVER, gateway: a request over HTTP, or one input of it, as long as its `total_ns`"
    )
    HTTP_BATCH = Name("http.batch", "SERVER, gateway: a request over HTTP with many inputs")
    OIP_INFER = Name(
        "inference.GRPCInferenceService/ModelInfer", "SERVER, gateway: a call of the Open Inference Protocol"
    )
    OIP_STREAM = Name(
        "inference.GRPCInferenceService/ModelStreamInfer", "SERVER, gateway: one request of a stream, as above"
    )
    TEI_EMBED = Name("tei.v1.Embed/Embed", "SERVER, gateway: one request, also of EmbedStream, as `Infer`")
    TEI_EMBED_SPARSE = Name("tei.v1.Embed/EmbedSparse", "SERVER, gateway: the same, also of EmbedSparseStream")
    TEI_EMBED_ALL = Name("tei.v1.Embed/EmbedAll", "SERVER, gateway: the same, also of EmbedAllStream")
    TEI_PREDICT = Name("tei.v1.Predict/Predict", "SERVER, gateway: the same, also of PredictStream")
    TEI_PREDICT_PAIR = Name("tei.v1.Predict/PredictPair", "SERVER, gateway: the same, also of PredictPairStream")
    TEI_RERANK = Name("tei.v1.Rerank/Rerank", "SERVER, gateway: the same, also of RerankStream")
    TEI_TOKENIZE = Name("tei.v1.Tokenize/Tokenize", "SERVER, gateway: the same, also of TokenizeStream")
    TEI_DECODE = Name("tei.v1.Tokenize/Decode", "SERVER, gateway: the same, also of DecodeStream")
    REQUEST = Name(
        "request", "gateway: one request of an InferBatch, or one row of a ModelInfer, as long as its `total_ns`"
    )
    PREPROCESS = Name("preprocess", "gateway: tokenizing, hop and queue included (`preprocess_ns`)")
    PREDICT = Name("predict", "gateway: prediction, hop and queue included (`predict_ns`)")
    POSTPROCESS = Name("postprocess", "gateway: decoding, hop and queue included (`postprocess_ns`)")
    TOKENIZE_RPC = Name(
        "neuronpipe.api.v1.TokenizerService/Tokenize", "SERVER, tokenizer: one item, from its message to its outcome"
    )
    EXECUTE_RPC = Name("neuronpipe.api.v1.NeuronExecutorService/Execute", "SERVER, neuron-executor: one item, as above")
    POSTPROCESS_RPC = Name(
        "neuronpipe.api.v1.PostprocessorService/Postprocess", "SERVER, postprocessor: one item, as above"
    )
    QUEUE = Name(
        "predict.queue",
        "neuron-executor: a time in which no sequence of the item is computed; their sum is `predict_queue_ns`",
    )
    COMPUTE = Name(
        "predict.compute",
        "neuron-executor: a batch with sequences of the item runs; these spans cover `predict_compute_ns`",
    )
    BATCH = Name(
        "batch",
        "neuron-executor: one run of the model, a trace of its own, with a link to the compute span of "
        "each sampled row",
    )
    JOB = Name(
        "job", "worker: one attempt to run a job, a trace of its own, with a link to the span that submitted the job"
    )


class Attributes:
    """Attributes of spans, links and metrics."""

    MODEL = Name("neuronpipe.model.name", "the model's name; empty if the request names no served model")
    VERSION = Name("neuronpipe.model.version", "the version that runs")
    TASK = Name("neuronpipe.task", "the model's task")
    BACKEND = Name("neuronpipe.backend", "the back end that runs it")
    REQUEST_ID = Name("neuronpipe.request.id", "the request's id")
    TENANT = Name("neuronpipe.tenant", "the tenant of the caller; none where callers are not authenticated")
    QUOTA = Name("neuronpipe.quota", "requests_in_flight, tokens_in_flight or tokens_per_minute")
    FILE = Name("neuronpipe.file", "the option that names the file, or registry.json")
    VERSION_STATE = Name("neuronpipe.model.state", "loading, ready, draining, closed or failed")
    ROLE = Name("neuronpipe.version.role", "answer: callers got it; copy: a shadow computed it, and no caller got it")
    PRIORITY = Name("neuronpipe.request.priority", "interactive or bulk")
    STAGE = Name(
        "neuronpipe.stage",
        "preprocess, predict, postprocess; predict.queue, predict.compute; unattributed: in no stage; admission",
    )
    UNATTRIBUTED_NS = Name(
        "neuronpipe.unattributed_ns", "time of a request's span that is in none of its three stages, in nanoseconds"
    )
    TOKENS = Name("neuronpipe.tokens", "tokens given to the model")
    TRUNCATED_TOKENS = Name("neuronpipe.truncated_tokens", "tokens dropped to fit the model")
    TOKEN_CACHE = Name(
        "neuronpipe.token_cache", "where the tokenization came from: none, hit_memory, hit_redis, miss or bypass"
    )
    RESULT_CACHE = Name(
        "neuronpipe.result_cache",
        "where the result came from, with the same values; only for models whose results are cached",
    )
    CACHE = Name("neuronpipe.cache", "which cache: tokens, pixels or results")
    SEQUENCES = Name("neuronpipe.sequences", "sequences of the item")
    BATCH_SIZE = Name("neuronpipe.batch.size", "sequences in the batch; of an item in several batches, the largest")
    BUCKET_TOKENS = Name(
        "neuronpipe.bucket.tokens", "the batch's padded length; of an item in several batches, the largest"
    )
    PADDED_TOKENS = Name("neuronpipe.padded_tokens", "tokens computed, padding included")
    PADDING_RATIO = Name("neuronpipe.padding_ratio", "share of padding in the computed tokens")
    JOB_ID = Name("neuronpipe.job.id", "the job's id")
    JOB_PRIORITY = Name("neuronpipe.job.priority", "high, normal or low")
    JOB_STATE = Name("neuronpipe.job.state", "how a job ended: succeeded, failed, cancelled, expired or dead")
    INPUTS = Name("neuronpipe.job.inputs", "the number of the job's inputs; 0 where they are in an object")
    ROW = Name("neuronpipe.batch.row", "the sequence's row in the batch")
    CORE = Name("neuronpipe.core", "the core that runs the batch")
    PART = Name("neuronpipe.part", "the part of a model over several cores, from 0")
    IS_ALONE = Name("neuronpipe.batch.is_alone", "whether the batch ran alone, on all cores")
    GENERATED_TOKENS = Name("neuronpipe.generated_tokens", "tokens of a generated text")
    CACHED_TOKENS = Name("neuronpipe.cached_tokens", "tokens of a prompt that were found in the key-value cache")
    STEPS = Name("neuronpipe.steps", "steps in which tokens of a sequence were computed")
    PREEMPTIONS = Name("neuronpipe.preemptions", "how often a sequence gave its blocks back, and was computed again")
    FIRST_TOKEN_NS = Name(
        "neuronpipe.first_token_ns",
        "time to first token of a generated text, in nanoseconds; this and the following as in StageTimings",
    )
    PREFILL_NS = Name("neuronpipe.prefill_ns", "from the first step with the prompt to the first token")
    DECODE_NS = Name("neuronpipe.decode_ns", "from the first token to the last")
    LONGEST_GAP_NS = Name("neuronpipe.longest_gap_ns", "the longest time between two tokens")
    OUTCOME = Name("neuronpipe.outcome", "the outcome")
    MEMORY_LOCATION = Name("neuronpipe.neuron.memory_location", "device or host")
    PERCENTILE = Name("neuronpipe.neuron.percentile", "p0, p1, p25, p50, p75, p99 or p100")
    NEURON_OUTCOME = Name(
        "neuronpipe.neuron.outcome", "outcome of an execution, as neuron-monitor names it: completed, timed_out, …"
    )
    NEURON_ERROR = Name("neuronpipe.neuron.error", "generic, numerical, transient, model, runtime or hardware")
    SERVICE = Name("neuronpipe.service", "the service of the stage")
    LIMIT = Name("neuronpipe.limit", "the setting that was exceeded; protocol: what HTTP/2 allows a peer to send")
    DOOR = Name("neuronpipe.door", "grpc or http")
    TLS_SIDE = Name(
        "neuronpipe.tls.side", "server: of the process's ports; client: of a gateway's connections to stages"
    )
    RPC_SYSTEM = Name("rpc.system.name", "grpc")
    RPC_METHOD = Name("rpc.method", "the rpc, fully qualified")
    RPC_STATUS = Name("rpc.response.status_code", "the gRPC status, as `OK` or `DEADLINE_EXCEEDED`")
    ERROR_TYPE = Name("error.type", "on a failure, the gRPC status")


class Events:
    """Events of spans."""

    SHED = Name("shed", "refused or ended because of overload (load shedding)")
    EXPIRED = Name("expired", "its deadline passed, or could not be met")
    CANCELLED = Name("cancelled", "its caller cancelled the call or disconnected")
    FIRST_TOKEN = Name("first token", "the first token of a generated text")
    HELD = Name("held", "held by the gateway, because no process of the stage has the model")
    RELEASED = Name("released", "held no longer: a process has the model, or the request has ended")
    PREEMPTED = Name("preempted", "a text that is generated gave its blocks back, and is computed again")
    RETRIED = Name("retried", "sent again to another process, because the first one is gone or stops")


# Upper bounds of histograms' buckets.
_DURATIONS_MS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000)
_DURATIONS_NS = tuple(round(milliseconds * 1e6) for milliseconds in _DURATIONS_MS)
_LONG_DURATIONS_NS = tuple(round(seconds * 1e9) for seconds in (0.05, 0.25, 1, 5, 15, 60, 300, 900, 3_600, 21_600))
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# From 0.1 ms to 10 minutes.
_FINE_DURATIONS_NS = tuple(round(1e5 * 1.1**step) for step in range(165))
_AGREEMENTS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_RATIOS = (0.0, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric.

    A metric in "s" is recorded in nanoseconds, as integers, so that sums stay exact, and exported in seconds. `bounds`:
    a histogram's upper bounds, in the unit that is recorded.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    text: str
    labels: tuple[Name, ...] = ()
    bounds: tuple[float, ...] = ()


def _counter(name: str, unit: str, text: str, *labels: Name) -> Instrument:
    return Instrument(name, "counter", unit, text, labels)


def _gauge(name: str, unit: str, text: str, *labels: Name) -> Instrument:
    return Instrument(name, "gauge", unit, text, labels)


def _histogram(name: str, unit: str, text: str, bounds: tuple[float, ...], *labels: Name) -> Instrument:
    return Instrument(name, "histogram", unit, text, labels, bounds)


def _durations(name: str, text: str, *labels: Name) -> Instrument:
    return _histogram(name, "s", text, _DURATIONS_NS, *labels)


_OF_MODEL = (Attributes.MODEL, Attributes.VERSION)
_OF_STAGE = (*_OF_MODEL, Attributes.STAGE)


class Metrics:
    """Metrics."""

    REQUEST_DURATION = _durations(
        "neuronpipe.request.duration",
        "requests in the gateway, from decoded to answered, with any outcome",
        *_OF_MODEL,
        Attributes.RPC_STATUS,
    )
    STAGE_DURATION = _durations(
        "neuronpipe.stage.duration",
        "the parts of answered requests: the same numbers as in their responses and spans",
        *_OF_STAGE,
    )
    REQUEST_TOKENS = _counter("neuronpipe.request.tokens", "{token}", "tokens of answered requests", *_OF_MODEL)
    REQUEST_TRUNCATED = _counter(
        "neuronpipe.request.truncated_tokens", "{token}", "tokens dropped to fit models", *_OF_MODEL
    )
    TOKEN_CACHE = _counter(
        "neuronpipe.token_cache.lookups",
        "{request}",
        "tokenizations by cache outcome",
        *_OF_MODEL,
        Attributes.TOKEN_CACHE,
    )
    RESULT_CACHE = _counter(
        "neuronpipe.result_cache.lookups",
        "{request}",
        "results by cache outcome, of models whose results are cached",
        *_OF_MODEL,
        Attributes.RESULT_CACHE,
    )
    CACHE_BYTES = _gauge("neuronpipe.cache.memory", "By", "memory that a cache uses in this process", Attributes.CACHE)
    CACHE_REDIS = _gauge(
        "neuronpipe.cache.redis_available", "1", "0 while Redis does not answer, else 1", Attributes.CACHE
    )
    SHED = _counter(
        "neuronpipe.request.shed", "{request}", "requests refused or ended because of overload, by stage", *_OF_STAGE
    )
    EXPIRED = _counter(
        "neuronpipe.request.expired", "{request}", "requests that failed by their deadline, by stage", *_OF_STAGE
    )
    CANCELLED = _counter(
        "neuronpipe.request.cancelled", "{request}", "requests that their caller cancelled, by stage", *_OF_STAGE
    )
    HELD = _gauge(
        "neuronpipe.held.requests", "{request}", "requests held because no process of a stage has their model"
    )
    HELD_DURATION = _histogram(
        "neuronpipe.held.duration", "s", "how long requests were held", _LONG_DURATIONS_NS, Attributes.SERVICE
    )
    HELD_ENDED = _counter(
        "neuronpipe.held.ended",
        "{request}",
        "held requests by outcome: sent to a process; ended before one came; refused, as too many were held",
        Attributes.SERVICE,
        Attributes.OUTCOME,
    )
    RETRIED = _counter("neuronpipe.item.retried", "{item}", "items sent again to another process", Attributes.SERVICE)
    REQUESTS_IN_FLIGHT = _gauge(
        "neuronpipe.request.in_flight", "{request}", "requests that the gateway has admitted and not answered yet"
    )
    IN_FLIGHT_SHARE = _gauge(
        "neuronpipe.request.in_flight_share",
        "1",
        "requests in flight, or their tokens if that is more, to what the gateway admits; for autoscaling",
    )
    TOKENS_IN_FLIGHT = _gauge(
        "neuronpipe.request.tokens_in_flight", "{token}", "tokens of the requests in flight, estimated until counted"
    )
    AUTHENTICATIONS = _counter(
        "neuronpipe.authentication.calls",
        "{call}",
        "calls by outcome: accepted, or why not, which callers are not told: missing, malformed, unknown_key, expired, "
        "not_yet_valid, wrong_audience, wrong_issuer, wrong_signature, wrong_algorithm, unknown_signing_key, "
        "missing_claim, no_tenant, unknown_certificate, acts_for_others (without the right to)",
        Attributes.OUTCOME,
    )
    FILE_LOADED = _gauge(
        "neuronpipe.file.loaded",
        "1",
        "0 while a file of keys or tenants, or the registry, cannot be used as it is now, and its last good content "
        "stays; else 1",
        Attributes.FILE,
    )
    TENANT_IN_FLIGHT = _gauge(
        "neuronpipe.tenant.in_flight", "{request}", "requests of a tenant that are in flight", Attributes.TENANT
    )
    TENANT_TOKENS = _counter(
        "neuronpipe.tenant.tokens", "{token}", "tokens of a tenant's admitted requests", Attributes.TENANT
    )
    TENANT_REFUSED = _counter(
        "neuronpipe.tenant.refused",
        "{request}",
        "requests that were refused since the tenant's quota was used up",
        Attributes.TENANT,
        Attributes.QUOTA,
    )
    TENANT_WAIT = _durations(
        "neuronpipe.tenant.wait", "how long admitted requests waited for their tenant's turn", Attributes.TENANT
    )
    BUDGET_REDIS = _gauge(
        "neuronpipe.tenant.budget_shared",
        "1",
        "0 while Redis does not answer, and each gateway has its share of the budgets alone; else 1",
    )
    ITEM_DURATION = _durations(
        "neuronpipe.item.duration",
        "items in a stage's process, from their message to their outcome",
        Attributes.RPC_METHOD,
        Attributes.RPC_STATUS,
    )
    ITEMS_IN_FLIGHT = _gauge("neuronpipe.item.in_flight", "{item}", "items being worked on", Attributes.RPC_METHOD)
    QUEUE_SEQUENCES = _gauge("neuronpipe.queue.sequences", "{sequence}", "sequences that wait for a core", *_OF_MODEL)
    QUEUE_TOKENS = _gauge(
        "neuronpipe.queue.tokens", "{token}", "tokens of the waiting sequences, each padded by itself", *_OF_MODEL
    )
    QUEUE_WORK = _gauge(
        "neuronpipe.queue.work",
        "s",
        "time for which the waiting sequences would keep all cores busy, as forecast; for autoscaling",
        *_OF_MODEL,
    )
    QUEUE_DROPPED = _counter(
        "neuronpipe.queue.dropped",
        "{item}",
        "items that were not computed, or whose outcome was of no use: shed, expired, cancelled or failed",
        *_OF_MODEL,
        Attributes.OUTCOME,
    )
    BATCH_SIZE = _histogram("neuronpipe.batch.size", "{sequence}", "sequences in a batch", _COUNTS, *_OF_MODEL)
    BATCH_PADDING = _histogram(
        "neuronpipe.batch.padding_ratio", "1", "share of padding in a batch", _RATIOS, *_OF_MODEL
    )
    BATCH_DURATION = _durations("neuronpipe.batch.duration", "runs of the model", *_OF_MODEL, Attributes.BACKEND)
    BATCH_TOKENS = _counter("neuronpipe.batch.tokens", "{token}", "tokens computed, padding included", *_OF_MODEL)
    BATCH_FAILURES = _counter("neuronpipe.batch.failures", "{batch}", "batches that could not be run", *_OF_MODEL)
    CORE_BUSY = _counter(
        "neuronpipe.core.busy",
        "s",
        "time in which a core computed batches; its rate is utilisation",
        *_OF_MODEL,
        Attributes.CORE,
    )
    PART_BUSY = _counter(
        "neuronpipe.part.busy",
        "s",
        "time in which a part of a model over several cores computed batches; the part with the highest rate limits it",
        *_OF_MODEL,
        Attributes.PART,
    )
    CORES = _gauge("neuronpipe.cores", "{core}", "cores that a model can use; lost cores do not count", *_OF_MODEL)
    VERSION_STATE = _gauge(
        "neuronpipe.version.state",
        "1",
        "1 for the state that a version of a model has in this process, 0 for the others",
        *_OF_MODEL,
        Attributes.VERSION_STATE,
    )
    VERSION_FETCHED = _gauge(
        "neuronpipe.version.fetched",
        "1",
        "share of the bytes of a version of a model that this process has fetched from a bucket; 1 for what is here",
        *_OF_MODEL,
    )
    VERSION_LOADS = _counter(
        "neuronpipe.version.loads",
        "{load}",
        "attempts to load a version of a model, by outcome: ready or failed",
        *_OF_MODEL,
        Attributes.OUTCOME,
    )
    MODEL_MEMORY = _gauge(
        "neuronpipe.model.memory",
        "By",
        "memory of a loaded model, as max_model_memory_bytes counts it: its files, and its key-value cache",
        *_OF_MODEL,
    )
    MODEL_LOADS = _counter(
        "neuronpipe.model.on_demand",
        "{model}",
        "with models_on_demand, what became of models: loaded, failed (they could not be), unloaded to make room",
        *_OF_MODEL,
        Attributes.OUTCOME,
    )
    MODEL_WAIT = _histogram(
        "neuronpipe.model.load_wait",
        "s",
        "with models_on_demand, how long items waited until their model was loaded",
        _LONG_DURATIONS_NS,
        *_OF_MODEL,
    )
    VERSION_DURATION = _histogram(
        "neuronpipe.version.duration",
        "s",
        "computed answers, and copies of requests, of models whose requests are distributed over versions or copied; "
        "in buckets of 10 %, for comparing versions",
        _FINE_DURATIONS_NS,
        *_OF_MODEL,
        Attributes.ROLE,
    )
    SHADOW_AGREEMENT = _histogram(
        "neuronpipe.shadow.agreement",
        "1",
        "how far a version agrees, for a copy of a request, with the version that answered, by the terms of the "
        "compiler's accuracy",
        _AGREEMENTS,
        *_OF_MODEL,
    )
    SHADOW_COPIES = _counter(
        "neuronpipe.shadow.copies",
        "{request}",
        "copies of requests, by outcome: compared; incomparable (there is no agreement to measure); dropped (there was "
        "no room); late; failed",
        *_OF_MODEL,
        Attributes.OUTCOME,
    )
    MODEL_SHAPES = _gauge(
        "neuronpipe.model.shapes",
        "{shape}",
        "shapes of batches that a model is to compute, on all cores",
        *_OF_MODEL,
    )
    MODEL_SHAPES_READY = _gauge(
        "neuronpipe.model.shapes_ready",
        "{shape}",
        "planned shapes that were computed at least once, so that the next batch needs no preparation",
        *_OF_MODEL,
    )
    LONE_GRAPHS = _gauge(
        "neuronpipe.model.lone_graphs",
        "{graph}",
        "graphs of one length each, for texts that come singly",
        *_OF_MODEL,
    )
    LONE_GRAPH_MEMORY = _gauge(
        "neuronpipe.model.lone_graph_memory", "By", "memory of the graphs of single lengths", *_OF_MODEL
    )
    READY_DURATION = _gauge(
        "neuronpipe.model.ready_duration", "s", "time to load a model and warm it up", *_OF_MODEL, Attributes.BACKEND
    )
    TIME_TO_FIRST_TOKEN = _durations(
        "neuronpipe.generation.time_to_first_token",
        "from a prompt's arrival in the executor to its first token",
        *_OF_MODEL,
    )
    INTER_TOKEN_LATENCY = _durations(
        "neuronpipe.generation.inter_token_latency",
        "times between two tokens of a text, or between those that come together",
        *_OF_MODEL,
    )
    TIME_PER_OUTPUT_TOKEN = _durations(
        "neuronpipe.generation.time_per_output_token",
        "decode time of a complete text by its tokens but the first",
        *_OF_MODEL,
    )
    PREFILL_DURATION = _durations(
        "neuronpipe.generation.prefill_duration",
        "from the first step with a prompt to its first token, of complete texts",
        *_OF_MODEL,
    )
    DECODE_DURATION = _durations(
        "neuronpipe.generation.decode_duration", "from the first token to the last, of complete texts", *_OF_MODEL
    )
    LONGEST_GAP = _durations(
        "neuronpipe.generation.longest_gap", "the longest time between two tokens of a complete text", *_OF_MODEL
    )
    GENERATED = _counter("neuronpipe.generation.tokens", "{token}", "tokens generated", *_OF_MODEL)
    PROMPT_TOKENS = _counter(
        "neuronpipe.generation.prompt_tokens", "{token}", "tokens of prompts, computed or cached", *_OF_MODEL
    )
    CACHED_PROMPT_TOKENS = _counter(
        "neuronpipe.generation.cached_tokens", "{token}", "tokens of prompts found in the key-value cache", *_OF_MODEL
    )
    DRAFT_TOKENS = _counter(
        "neuronpipe.generation.draft_tokens",
        "{token}",
        "tokens guessed by prompt lookup",
        *_OF_MODEL,
    )
    ACCEPTED_TOKENS = _counter(
        "neuronpipe.generation.accepted_tokens",
        "{token}",
        "guessed tokens that were right",
        *_OF_MODEL,
    )
    PREEMPTIONS = _counter(
        "neuronpipe.generation.preemptions", "{preemption}", "sequences that gave their blocks back", *_OF_MODEL
    )
    STEP_SEQUENCES = _gauge(
        "neuronpipe.generation.sequences", "{sequence}", "sequences that take part in steps", *_OF_MODEL
    )
    BLOCKS_IN_USE = _gauge(
        "neuronpipe.generation.blocks_in_use", "1", "share of the key-value cache's blocks in use", *_OF_MODEL
    )
    NEURON_UTILIZATION = _gauge(
        "neuronpipe.neuron.core.utilization",
        "1",
        "share of the time in which a NeuronCore computed; reported by neuron-monitor, as all neuronpipe.neuron",
        Attributes.CORE,
    )
    NEURON_CORE_MEMORY = _gauge(
        "neuronpipe.neuron.core.memory", "By", "device memory that this process has on a NeuronCore", Attributes.CORE
    )
    NEURON_MEMORY = _gauge(
        "neuronpipe.neuron.memory", "By", "memory of this process's Neuron runtime", Attributes.MEMORY_LOCATION
    )
    NEURON_DEVICE_LATENCY = _gauge(
        "neuronpipe.neuron.device_latency",
        "s",
        "executions on the device in the monitor's last period",
        Attributes.PERCENTILE,
    )
    NEURON_TOTAL_LATENCY = _gauge(
        "neuronpipe.neuron.total_latency", "s", "the same as the Neuron runtime sees them", Attributes.PERCENTILE
    )
    NEURON_EXECUTIONS = _counter(
        "neuronpipe.neuron.executions", "{execution}", "executions by outcome", Attributes.NEURON_OUTCOME
    )
    NEURON_ERRORS = _counter("neuronpipe.neuron.errors", "{error}", "errors of executions", Attributes.NEURON_ERROR)
    JOBS_WAITING = _gauge("neuronpipe.jobs.waiting", "{job}", "jobs that no worker has", Attributes.JOB_PRIORITY)
    JOBS_OLDEST = _gauge(
        "neuronpipe.jobs.oldest", "s", "how long the first of these jobs has waited", Attributes.JOB_PRIORITY
    )
    JOBS_RUNNING = _gauge("neuronpipe.jobs.running", "{job}", "jobs that workers have", Attributes.JOB_PRIORITY)
    JOBS_DEAD = _gauge("neuronpipe.jobs.dead", "{job}", "jobs that were set aside, since workers died with them")
    JOBS_ENDED = _counter(
        "neuronpipe.jobs.ended", "{job}", "jobs that this worker has ended, by how", Attributes.JOB_STATE
    )
    JOBS_RETRIED = _counter("neuronpipe.jobs.retried", "{job}", "jobs that this worker took from one that had died")
    JOB_WAIT = _histogram(
        "neuronpipe.job.wait",
        "s",
        "from the submission of a job to its first attempt",
        _LONG_DURATIONS_NS,
        Attributes.JOB_PRIORITY,
    )
    JOB_DURATION = _histogram(
        "neuronpipe.job.duration", "s", "attempts to run a job, with any outcome", _LONG_DURATIONS_NS
    )
    NOTIFICATIONS = _counter(
        "neuronpipe.job.notifications",
        "{notification}",
        "attempts to tell receivers of ended jobs: accepted; refused (will be tried again); given_up",
        Attributes.OUTCOME,
    )
    NOTIFICATIONS_WAITING = _gauge(
        "neuronpipe.job.notifications_waiting", "{notification}", "receivers that are still to be told"
    )
    CONNECTIONS = _gauge("neuronpipe.connection.open", "{connection}", "open connections of a port", Attributes.DOOR)
    CONNECTIONS_ENDED = _counter(
        "neuronpipe.connection.ended",
        "{connection}",
        "connections that were refused or ended because they exceeded a limit",
        Attributes.DOOR,
        Attributes.LIMIT,
    )
    CALLS_ENDED = _counter(
        "neuronpipe.call.ended",
        "{call}",
        "calls that were ended since they waited for their caller beyond a limit, or since too many did",
        Attributes.LIMIT,
    )
    TLS_EXPIRY = _gauge(
        "neuronpipe.tls.certificate.expiry",
        "s",
        "when the certificate in use expires, in seconds since 1970",
        Attributes.TLS_SIDE,
    )
    TLS_REJECTED = _gauge(
        "neuronpipe.tls.files_rejected",
        "1",
        "1 while changed TLS files cannot be used and what they held before is, else 0",
        Attributes.TLS_SIDE,
    )
    SPANS = _counter(
        "neuronpipe.telemetry.spans",
        "{span}",
        "spans by outcome: exported; dropped (the queue was full); failed (the collector did not accept them)",
        Attributes.OUTCOME,
    )


# The stage of a request that was refused before any stage.
ADMISSION = "admission"
UNATTRIBUTED = "unattributed"


def instruments() -> list[Instrument]:
    """All metrics, in order."""
    return [value for value in vars(Metrics).values() if isinstance(value, Instrument)]
