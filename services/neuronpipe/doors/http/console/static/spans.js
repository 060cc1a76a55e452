// The spans of a request: from its trace where the server keeps traces, else from the timings of its response.

const NANOSECONDS = 1e6;
const ERROR = 2;
// By the span's name, or else its service.
const KINDS = {
  preprocess: "preprocess", predict: "predict", postprocess: "postprocess",
  "predict.queue": "queue", "predict.compute": "compute",
  tokenizer: "preprocess", "neuron-executor": "predict", postprocessor: "postprocess",
};

/** A span in a new trace, as a header traceparent (W3C trace context) that asks for its spans, and its trace's id. */
export function newTrace() {
  const hex = (bytes) => Array.from(crypto.getRandomValues(new Uint8Array(bytes)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const id = hex(16);
  return { id, traceparent: `00-${id}-${hex(8)}-01` };
}

/** Rows of a waterfall: names as in traces, their depth, when they begin and how long they take, in ms. */
export function spansOfTimings(timings) {
  const ms = (name) => Number(timings[`${name}_ns`]) / NANOSECONDS;
  const [total, preprocess, predict, postprocess] = ["total", "preprocess", "predict", "postprocess"].map(ms);
  const [queue, compute] = ["predict_queue", "predict_compute"].map(ms);
  const root = { name: "http.request", kind: "gateway", depth: 0, at: 0, ms: total };
  if (!predict) return [root]; // the result was cached
  const part = (name, depth, at, ms) => ({ name, kind: KINDS[name], depth, at, ms });
  return [
    root,
    part("preprocess", 1, 0, preprocess),
    part("predict", 1, preprocess, predict),
    part("predict.queue", 2, preprocess, queue),
    part("predict.compute", 2, preprocess + queue, compute),
    part("postprocess", 1, preprocess + predict, postprocess),
  ];
}

/** The same of a trace in OTLP JSON, and the batches that it ran in; undefined where the server has dropped it. */
export function readTrace(otlp, traceId) {
  const spans = otlp.resourceSpans.flatMap(({ resource, scopeSpans }) =>
    scopeSpans.flatMap((scope) => scope.spans.map((span) => readSpan(span, valuesOf(resource.attributes)["service.name"]))));
  const own = spans.filter((span) => span.traceId === traceId).sort((one, other) => Number(one.began - other.began) || other.ms - one.ms);
  if (!own.length) return undefined;
  const known = new Set(own.map((span) => span.id));
  const rows = (parent, depth) =>
    own.filter((span) => (known.has(span.parent) ? span.parent : "") === parent)
      .flatMap((span) => [{ ...span, depth, at: Number(span.began - own[0].began) / NANOSECONDS }, ...rows(span.id, depth + 1)]);
  return { spans: rows("", 0), batches: spans.filter((span) => span.traceId !== traceId) };
}

function readSpan(span, service) {
  const [began, ended] = [BigInt(span.startTimeUnixNano), BigInt(span.endTimeUnixNano)];
  const isError = span.status.code === ERROR;
  return {
    traceId: span.traceId, id: span.spanId, parent: span.parentSpanId, name: span.name.split("/").at(-1), service, began,
    ms: Number(ended - began) / NANOSECONDS,
    kind: isError ? "failed" : KINDS[span.name] ?? KINDS[service] ?? "gateway",
    attributes: valuesOf(span.attributes),
    links: span.links.map((link) => ({ traceId: link.traceId, ...valuesOf(link.attributes) })),
  };
}

const valuesOf = (attributes) => Object.fromEntries(attributes.map(({ key, value }) => [key, Object.values(value)[0]]));
