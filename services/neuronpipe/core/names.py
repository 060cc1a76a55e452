"""The names of services, metadata keys and telemetry. Defined only here; docs/telemetry.md is made from them.

A span, an attribute or an event is a `Name`: a string with a description. A metric is an `Instrument`.
"""

from dataclasses import dataclass
from typing import Literal

# The services of the stages.
TOKENIZER, EXECUTOR, POSTPROCESSOR = STAGES = "tokenizer", "neuron-executor", "postprocessor"
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
        name = super().__new__(cls, word)
        name.text = text
        return name


_PREFIX, _SERVICES = "neuronpipe.", "neuronpipe.api.v1"


def _own(word: str, text: str) -> Name:
    return Name(_PREFIX + word, text)


class Spans:
    """Spans. A span of kind SERVER has the name of its rpc, as OpenTelemetry's conventions require."""

    INFER = Name(f"{_SERVICES}.InferenceService/Infer", "SERVER, gateway: one request, as long as its `total_ns`")
    INFER_BATCH = Name(f"{_SERVICES}.InferenceService/InferBatch", "SERVER, gateway: a call with many requests")
    INFER_STREAM = Name(
        f"{_SERVICES}.InferenceService/InferStream", "SERVER, gateway: one request of a stream, as `Infer`"
    )
    GENERATE = Name(f"{_SERVICES}.InferenceService/Generate", "SERVER, gateway: one request that generates, as `Infer`")
    HTTP_REQUEST = Name("http.request", "SERVER, gateway: a request over HTTP, or one input, as long as its `total_ns`")
    HTTP_BATCH = Name("http.batch", "SERVER, gateway: a request over HTTP with many inputs")
    OIP_INFER = Name("inference.GRPCInferenceService/ModelInfer", "SERVER, gateway: an Open Inference Protocol call")
    OIP_STREAM = Name("inference.GRPCInferenceService/ModelStreamInfer", "SERVER, gateway: a request of a stream")
    TEI_EMBED = Name("tei.v1.Embed/Embed", "SERVER, gateway: one request, also of EmbedStream, as `Infer`")
    TEI_EMBED_SPARSE = Name("tei.v1.Embed/EmbedSparse", "SERVER, gateway: the same, also of EmbedSparseStream")
    TEI_EMBED_ALL = Name("tei.v1.Embed/EmbedAll", "SERVER, gateway: the same, also of EmbedAllStream")
    TEI_PREDICT = Name("tei.v1.Predict/Predict", "SERVER, gateway: the same, also of PredictStream")
    TEI_PREDICT_PAIR = Name("tei.v1.Predict/PredictPair", "SERVER, gateway: the same, also of PredictPairStream")
    TEI_RERANK = Name("tei.v1.Rerank/Rerank", "SERVER, gateway: the same, also of RerankStream")
    TEI_TOKENIZE = Name("tei.v1.Tokenize/Tokenize", "SERVER, gateway: the same, also of TokenizeStream")
    TEI_DECODE = Name("tei.v1.Tokenize/Decode", "SERVER, gateway: the same, also of DecodeStream")
    REQUEST = Name("request", "gateway: a request of an InferBatch or a row of a ModelInfer, as long as its `total_ns`")
    PREPROCESS = Name("preprocess", "gateway: tokenizing, hop and queue included (`preprocess_ns`)")
    PREDICT = Name("predict", "gateway: prediction, hop and queue included (`predict_ns`)")
    POSTPROCESS = Name("postprocess", "gateway: decoding, hop and queue included (`postprocess_ns`)")
    TOKENIZE_RPC = Name(f"{_SERVICES}.TokenizerService/Tokenize", "SERVER, tokenizer: an item, from message to outcome")
    EXECUTE_RPC = Name(f"{_SERVICES}.NeuronExecutorService/Execute", "SERVER, neuron-executor: one item, as above")
    POSTPROCESS_RPC = Name(f"{_SERVICES}.PostprocessorService/Postprocess", "SERVER, postprocessor: one item, as above")
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
    JOB = Name("job", "worker: an attempt to run a job, a trace of its own, linked to the span that submitted the job")


class Attributes:
    """Attributes of spans, links and metrics."""

    MODEL = _own("model.name", "the model's name; empty if the request names no served model")
    VERSION = _own("model.version", "the version that runs")
    TASK = _own("task", "the model's task")
    BACKEND = _own("backend", "the back end that runs it")
    REQUEST_ID = _own("request.id", "the request's id")
    TENANT = _own("tenant", "the tenant of the caller; none where callers are not authenticated")
    QUOTA = _own("quota", "requests_in_flight, tokens_in_flight or tokens_per_minute")
    FILE = _own("file", "the option that names the file, or registry.json")
    VERSION_STATE = _own("model.state", "loading, ready, draining, closed or failed")
    ROLE = _own("version.role", "answer: callers got it; copy: a shadow computed it, and no caller got it")
    PRIORITY = _own("request.priority", "interactive or bulk")
    STAGE = _own(
        "stage",
        "preprocess, predict, postprocess; predict.queue, predict.compute; unattributed: in no stage; admission",
    )
    UNATTRIBUTED_NS = _own("unattributed_ns", "time of a request's span outside of its three stages, in nanoseconds")
    TOKENS = _own("tokens", "tokens given to the model")
    TRUNCATED_TOKENS = _own("truncated_tokens", "tokens dropped to fit the model")
    TOKEN_CACHE = _own("token_cache", "where the tokenization came from: none, hit_memory, hit_redis, miss or bypass")
    RESULT_CACHE = _own(
        "result_cache", "where the result came from, with the same values; only for models whose results are cached"
    )
    CACHE = _own("cache", "which cache: tokens, pixels or results")
    SEQUENCES = _own("sequences", "sequences of the item")
    BATCH_SIZE = _own("batch.size", "sequences in the batch; of an item in several batches, the largest")
    BUCKET_TOKENS = _own("bucket.tokens", "the batch's padded length; of an item in several batches, the largest")
    PADDED_TOKENS = _own("padded_tokens", "tokens computed, padding included")
    PADDING_RATIO = _own("padding_ratio", "share of padding in the computed tokens")
    JOB_ID = _own("job.id", "the job's id")
    JOB_PRIORITY = _own("job.priority", "high, normal or low")
    JOB_STATE = _own("job.state", "how a job ended: succeeded, failed, cancelled, expired or dead")
    INPUTS = _own("job.inputs", "the number of the job's inputs; 0 where they are in an object")
    ROW = _own("batch.row", "the sequence's row in the batch")
    CORE = _own("core", "the core that runs the batch")
    PART = _own("part", "the part of a model over several cores, from 0")
    IS_ALONE = _own("batch.is_alone", "whether the batch ran alone, on all cores")
    GENERATED_TOKENS = _own("generated_tokens", "tokens of a generated text")
    CACHED_TOKENS = _own("cached_tokens", "tokens of a prompt that were found in the key-value cache")
    STEPS = _own("steps", "steps in which tokens of a sequence were computed")
    PREEMPTIONS = _own("preemptions", "how often a sequence gave its blocks back, and was computed again")
    FIRST_TOKEN_NS = _own(
        "first_token_ns",
        "time to first token of a generated text, in nanoseconds; this and the following as in StageTimings",
    )
    PREFILL_NS = _own("prefill_ns", "from the first step with the prompt to the first token")
    DECODE_NS = _own("decode_ns", "from the first token to the last")
    LONGEST_GAP_NS = _own("longest_gap_ns", "the longest time between two tokens")
    OUTCOME = _own("outcome", "the outcome")
    MEMORY_LOCATION = _own("neuron.memory_location", "device or host")
    PERCENTILE = _own("neuron.percentile", "p0, p1, p25, p50, p75, p99 or p100")
    NEURON_OUTCOME = _own("neuron.outcome", "outcome of an execution in neuron-monitor: completed, timed_out, …")
    NEURON_ERROR = _own("neuron.error", "generic, numerical, transient, model, runtime or hardware")
    SERVICE = _own("service", "the service of the stage")
    LIMIT = _own("limit", "the setting that was exceeded; protocol: what HTTP/2 allows a peer to send")
    DOOR = _own("door", "grpc or http")
    TLS_SIDE = _own("tls.side", "server: of the process's ports; client: of a gateway's connections to stages")
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
    return Instrument(_PREFIX + name, "counter", unit, text, labels)


def _gauge(name: str, unit: str, text: str, *labels: Name) -> Instrument:
    return Instrument(_PREFIX + name, "gauge", unit, text, labels)


def _histogram(name: str, unit: str, text: str, bounds: tuple[float, ...], *labels: Name) -> Instrument:
    return Instrument(name=_PREFIX + name, kind="histogram", unit=unit, text=text, labels=labels, bounds=bounds)


def _durations(name: str, text: str, *labels: Name) -> Instrument:
    return _histogram(name, "s", text, _DURATIONS_NS, *labels)


_OF_MODEL = (Attributes.MODEL, Attributes.VERSION)
_OF_STAGE = (*_OF_MODEL, Attributes.STAGE)
_BY_OUTCOME = (*_OF_MODEL, Attributes.OUTCOME)


class Metrics:
    REQUEST_DURATION = _durations(
        "request.duration",
        "requests in the gateway, from decoded to answered, with any outcome",
        *_OF_MODEL,
        Attributes.RPC_STATUS,
    )
    STAGE_DURATION = _durations(
        "stage.duration", "the parts of answered requests: the same numbers as in their responses and spans", *_OF_STAGE
    )
    REQUEST_TOKENS = _counter("request.tokens", "{token}", "tokens of answered requests", *_OF_MODEL)
    REQUEST_TRUNCATED = _counter("request.truncated_tokens", "{token}", "tokens dropped to fit models", *_OF_MODEL)
    TOKEN_CACHE = _counter(
        "token_cache.lookups", "{request}", "tokenizations by cache outcome", *_OF_MODEL, Attributes.TOKEN_CACHE
    )
    RESULT_CACHE = _counter(
        "result_cache.lookups",
        "{request}",
        "results by cache outcome, of models whose results are cached",
        *_OF_MODEL,
        Attributes.RESULT_CACHE,
    )
    CACHE_BYTES = _gauge("cache.memory", "By", "memory that a cache uses in this process", Attributes.CACHE)
    CACHE_REDIS = _gauge("cache.redis_available", "1", "0 while Redis does not answer, else 1", Attributes.CACHE)
    SHED = _counter("request.shed", "{request}", "requests refused or ended because of overload, by stage", *_OF_STAGE)
    EXPIRED = _counter("request.expired", "{request}", "requests that failed by their deadline, by stage", *_OF_STAGE)
    CANCELLED = _counter("request.cancelled", "{request}", "requests that their caller cancelled, by stage", *_OF_STAGE)
    HELD = _gauge("held.requests", "{request}", "requests held because no process of a stage has their model")
    HELD_DURATION = _histogram(
        "held.duration", "s", "time for which requests were held", _LONG_DURATIONS_NS, Attributes.SERVICE
    )
    HELD_ENDED = _counter(
        "held.ended",
        "{request}",
        "held requests by outcome: sent to a process; ended before one came; refused, as too many were held",
        Attributes.SERVICE,
        Attributes.OUTCOME,
    )
    RETRIED = _counter("item.retried", "{item}", "items sent again to another process", Attributes.SERVICE)
    REQUESTS_IN_FLIGHT = _gauge("request.in_flight", "{request}", "requests that are admitted and not answered yet")
    IN_FLIGHT_SHARE = _gauge(
        "request.in_flight_share",
        "1",
        "share of the limit of requests in flight, or of tokens if that share is larger; for autoscaling",
    )
    TOKENS_IN_FLIGHT = _gauge(
        "request.tokens_in_flight", "{token}", "tokens in flight, estimated until they are counted"
    )
    AUTHENTICATIONS = _counter(
        "authentication.calls",
        "{call}",
        "calls by outcome: accepted, or why not, which callers are not told: missing, malformed, unknown_key, "
        "expired, not_yet_valid, wrong_audience, wrong_issuer, wrong_signature, wrong_algorithm, unknown_signing_key,"
        " missing_claim, no_tenant, unknown_certificate, acts_for_others (without the right to)",
        Attributes.OUTCOME,
    )
    FILE_LOADED = _gauge(
        "file.loaded",
        "1",
        "0 while a file of keys or tenants, or the registry, cannot be used as it is now, and its last good content "
        "stays; else 1",
        Attributes.FILE,
    )
    PROCESS_WELL = _gauge(
        "process.well",
        "1",
        "0 while the process, or the executor of front processes, has lacked cores, or a back end has hung, for longer "
        "than --impaired-limit-s; else 1",
    )
    TENANT_IN_FLIGHT = _gauge("tenant.in_flight", "{request}", "requests of a tenant in flight", Attributes.TENANT)
    TENANT_TOKENS = _counter("tenant.tokens", "{token}", "tokens of a tenant's admitted requests", Attributes.TENANT)
    TENANT_REFUSED = _counter(
        "tenant.refused",
        "{request}",
        "requests that were refused because the tenant's quota was used up",
        Attributes.TENANT,
        Attributes.QUOTA,
    )
    TENANT_WAIT = _durations("tenant.wait", "wait of admitted requests for their tenant's turn", Attributes.TENANT)
    BUDGET_REDIS = _gauge(
        "tenant.budget_shared",
        "1",
        "0 while Redis does not answer, and each gateway has its share of the budgets alone; else 1",
    )
    ITEM_DURATION = _durations(
        "item.duration",
        "items in a stage's process, from their message to their outcome",
        Attributes.RPC_METHOD,
        Attributes.RPC_STATUS,
    )
    ITEMS_IN_FLIGHT = _gauge("item.in_flight", "{item}", "items being worked on", Attributes.RPC_METHOD)
    QUEUE_SEQUENCES = _gauge("queue.sequences", "{sequence}", "sequences that wait for a core", *_OF_MODEL)
    QUEUE_TOKENS = _gauge("queue.tokens", "{token}", "tokens of waiting sequences, each padded alone", *_OF_MODEL)
    QUEUE_WORK = _gauge(
        "queue.work",
        "s",
        "time for which the waiting sequences would keep all cores busy, as forecast; for autoscaling",
        *_OF_MODEL,
    )
    QUEUE_DROPPED = _counter(
        "queue.dropped",
        "{item}",
        "items that were not computed, or whose outcome was of no use: shed, expired, cancelled or failed",
        *_BY_OUTCOME,
    )
    BATCH_SIZE = _histogram("batch.size", "{sequence}", "sequences in a batch", _COUNTS, *_OF_MODEL)
    BATCH_PADDING = _histogram("batch.padding_ratio", "1", "share of padding in a batch", _RATIOS, *_OF_MODEL)
    BATCH_DURATION = _durations("batch.duration", "runs of the model", *_OF_MODEL, Attributes.BACKEND)
    BATCH_TOKENS = _counter("batch.tokens", "{token}", "tokens computed, padding included", *_OF_MODEL)
    BATCH_FAILURES = _counter("batch.failures", "{batch}", "batches that could not be run", *_OF_MODEL)
    CORE_BUSY = _counter(
        "core.busy", "s", "time in which a core computed batches; its rate is utilisation", *_OF_MODEL, Attributes.CORE
    )
    PART_BUSY = _counter(
        "part.busy",
        "s",
        "time in which a part of a model over several cores computed batches; the part with the highest rate limits it",
        *_OF_MODEL,
        Attributes.PART,
    )
    CORES = _gauge("cores", "{core}", "cores that a model can use; lost cores do not count", *_OF_MODEL)
    VERSION_STATE = _gauge(
        "version.state",
        "1",
        "1 for the state that a version of a model has in this process, 0 for the others",
        *_OF_MODEL,
        Attributes.VERSION_STATE,
    )
    VERSION_FETCHED = _gauge(
        "version.fetched",
        "1",
        "share of the bytes of a version of a model that this process has fetched from a bucket; 1 if all are local",
        *_OF_MODEL,
    )
    VERSION_LOADS = _counter("version.loads", "{load}", "attempts to load a version: ready or failed", *_BY_OUTCOME)
    MODEL_MEMORY = _gauge(
        "model.memory",
        "By",
        "memory of a loaded model, as max_model_memory_bytes counts it: its files, and its key-value cache",
        *_OF_MODEL,
    )
    MODEL_LOADS = _counter(
        "model.on_demand",
        "{model}",
        "with models_on_demand, models by outcome: loaded, failed to load, unloaded to make room",
        *_BY_OUTCOME,
    )
    MODEL_WAIT = _histogram(
        "model.load_wait",
        "s",
        "with models_on_demand, wait of items until their model was loaded",
        _LONG_DURATIONS_NS,
        *_OF_MODEL,
    )
    VERSION_DURATION = _histogram(
        "version.duration",
        "s",
        "computed answers, and copies of requests, of models whose requests are distributed over versions or copied; "
        "in buckets of 10 %, for comparing versions",
        _FINE_DURATIONS_NS,
        *_OF_MODEL,
        Attributes.ROLE,
    )
    SHADOW_AGREEMENT = _histogram(
        "shadow.agreement",
        "1",
        "agreement of a copy's result with the answer, as the compiler defines agreement",
        _AGREEMENTS,
        *_OF_MODEL,
    )
    SHADOW_COPIES = _counter(
        "shadow.copies",
        "{request}",
        "copies of requests, by outcome: compared; incomparable (there is no agreement to measure); dropped (there "
        "was no room); late; failed",
        *_BY_OUTCOME,
    )
    MODEL_SHAPES = _gauge("model.shapes", "{shape}", "shapes of batches to compute, on all cores", *_OF_MODEL)
    MODEL_SHAPES_READY = _gauge(
        "model.shapes_ready",
        "{shape}",
        "planned shapes that were computed at least once, so that the next batch needs no preparation",
        *_OF_MODEL,
    )
    LONE_GRAPHS = _gauge(
        "model.lone_graphs", "{graph}", "lone graphs, each of one length, for single texts", *_OF_MODEL
    )
    LONE_GRAPH_MEMORY = _gauge("model.lone_graph_memory", "By", "memory of the lone graphs", *_OF_MODEL)
    READY_DURATION = _gauge(
        "model.ready_duration", "s", "time to load a model and warm it up", *_OF_MODEL, Attributes.BACKEND
    )
    TIME_TO_FIRST_TOKEN = _durations(
        "generation.time_to_first_token", "from a prompt's arrival in the executor to its first token", *_OF_MODEL
    )
    INTER_TOKEN_LATENCY = _durations(
        "generation.inter_token_latency",
        "times between two tokens of a text, or between groups of tokens that come together",
        *_OF_MODEL,
    )
    TIME_PER_OUTPUT_TOKEN = _durations(
        "generation.time_per_output_token",
        "decode time of a complete text, divided by its tokens after the first",
        *_OF_MODEL,
    )
    PREFILL_DURATION = _durations(
        "generation.prefill_duration",
        "from the first step with a prompt to its first token, of complete texts",
        *_OF_MODEL,
    )
    DECODE_DURATION = _durations(
        "generation.decode_duration", "from the first token to the last, of complete texts", *_OF_MODEL
    )
    LONGEST_GAP = _durations("generation.longest_gap", "longest time between tokens of a complete text", *_OF_MODEL)
    GENERATED = _counter("generation.tokens", "{token}", "tokens generated", *_OF_MODEL)
    PROMPT_TOKENS = _counter("generation.prompt_tokens", "{token}", "tokens of prompts, computed or cached", *_OF_MODEL)
    CACHED_PROMPT_TOKENS = _counter(
        "generation.cached_tokens", "{token}", "tokens of prompts found in the key-value cache", *_OF_MODEL
    )
    DRAFT_TOKENS = _counter("generation.draft_tokens", "{token}", "draft tokens of prompt lookup", *_OF_MODEL)
    ACCEPTED_TOKENS = _counter("generation.accepted_tokens", "{token}", "draft tokens that were right", *_OF_MODEL)
    PREEMPTIONS = _counter("generation.preemptions", "{preemption}", "sequences that gave blocks back", *_OF_MODEL)
    STEP_SEQUENCES = _gauge("generation.sequences", "{sequence}", "sequences that take part in steps", *_OF_MODEL)
    BLOCKS_IN_USE = _gauge("generation.blocks_in_use", "1", "share of the key-value cache's blocks in use", *_OF_MODEL)
    NEURON_UTILIZATION = _gauge(
        "neuron.core.utilization",
        "1",
        "share of the time in which a NeuronCore computed; reported by neuron-monitor, as all neuronpipe.neuron",
        Attributes.CORE,
    )
    NEURON_CORE_MEMORY = _gauge("neuron.core.memory", "By", "this process's memory on a NeuronCore", Attributes.CORE)
    NEURON_MEMORY = _gauge("neuron.memory", "By", "memory of this process's Neuron runtime", Attributes.MEMORY_LOCATION)
    NEURON_DEVICE_LATENCY = _gauge(
        "neuron.device_latency", "s", "executions on the device in the monitor's last period", Attributes.PERCENTILE
    )
    NEURON_TOTAL_LATENCY = _gauge(
        "neuron.total_latency", "s", "the same as the Neuron runtime sees them", Attributes.PERCENTILE
    )
    NEURON_EXECUTIONS = _counter("neuron.executions", "{execution}", "executions by outcome", Attributes.NEURON_OUTCOME)
    NEURON_ERRORS = _counter("neuron.errors", "{error}", "errors of executions", Attributes.NEURON_ERROR)
    JOBS_WAITING = _gauge("jobs.waiting", "{job}", "jobs that wait for a worker", Attributes.JOB_PRIORITY)
    JOBS_OLDEST = _gauge("jobs.oldest", "s", "wait of the oldest of these jobs", Attributes.JOB_PRIORITY)
    JOBS_RUNNING = _gauge("jobs.running", "{job}", "jobs that workers run", Attributes.JOB_PRIORITY)
    JOBS_DEAD = _gauge("jobs.dead", "{job}", "jobs that were set aside because workers died with them")
    JOBS_ENDED = _counter("jobs.ended", "{job}", "jobs that this worker has ended, by state", Attributes.JOB_STATE)
    JOBS_RETRIED = _counter("jobs.retried", "{job}", "jobs that this worker took from a dead worker")
    JOB_WAIT = _histogram(
        "job.wait",
        "s",
        "from the submission of a job to its first attempt",
        _LONG_DURATIONS_NS,
        Attributes.JOB_PRIORITY,
    )
    JOB_DURATION = _histogram("job.duration", "s", "attempts to run a job, with any outcome", _LONG_DURATIONS_NS)
    NOTIFICATIONS = _counter(
        "job.notifications",
        "{notification}",
        "attempts to notify receivers of ended jobs: accepted; refused (tried again later); given_up",
        Attributes.OUTCOME,
    )
    NOTIFICATIONS_WAITING = _gauge(
        "job.notifications_waiting", "{notification}", "notifications that are still to be sent"
    )
    CONNECTIONS = _gauge("connection.open", "{connection}", "open connections of a port", Attributes.DOOR)
    CONNECTIONS_ENDED = _counter(
        "connection.ended",
        "{connection}",
        "connections that were refused or ended because they exceeded a limit",
        Attributes.DOOR,
        Attributes.LIMIT,
    )
    CALLS_ENDED = _counter(
        "call.ended",
        "{call}",
        "calls that were ended because they waited for their caller beyond a limit, or because too many did",
        Attributes.LIMIT,
    )
    TLS_EXPIRY = _gauge(
        "tls.certificate.expiry", "s", "when the certificate in use expires, in seconds since 1970", Attributes.TLS_SIDE
    )
    TLS_REJECTED = _gauge(
        "tls.files_rejected",
        "1",
        "1 while changed TLS files cannot be used and what they held before is, else 0",
        Attributes.TLS_SIDE,
    )
    SPANS = _counter(
        "telemetry.spans",
        "{span}",
        "spans by outcome: exported; dropped (the queue was full); failed (the collector did not accept them)",
        Attributes.OUTCOME,
    )


# The stage of a request that was refused before any stage.
ADMISSION = "admission"
UNATTRIBUTED = "unattributed"


def instruments() -> list[Instrument]:
    """Returns all metrics, in order."""
    return [value for value in vars(Metrics).values() if isinstance(value, Instrument)]
