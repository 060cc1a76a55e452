// Where a request's time went, in the rows and colours of `neuronpipe trace`.

import { make, number, percent } from "./dom.js";

const MOST_TICKS = 5;
const LAST_TICK = 0.92; // of the axis: its digits need room
const LEGEND = { gateway: "gateway", preprocess: "pre-process", predict: "prediction", queue: "queue", compute: "compute", postprocess: "post-process", failed: "failed" };
const MAX_MATES = 16;

/** A round distance between the ticks of an axis, such as 3 for an axis of 13. */
function stepOf(total) {
  const least = total / MOST_TICKS;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 3, 5, 10].map((digit) => digit * power).find((step) => step >= least);
}

/** The waterfall as a table, which reads well without its bars. `waitedMs`: how long the browser waited. */
export function waterfall(spans, waitedMs) {
  const total = Math.max(spans[0].ms, 1e-6);
  const isOneService = new Set(spans.map((span) => span.service)).size === 1;
  const column = (text) => make("th", { scope: "col" }, text);
  const step = stepOf(total);
  const ticks = Array.from({ length: Math.ceil((LAST_TICK * total) / step) }, (_, tick) =>
    make("span", { "--at": (tick * step) / total }, String(Number((tick * step).toPrecision(2)))));
  const head = make("tr", {}, column("Span"), make("th", { scope: "col", class: "ticks" }, ticks), column("ms"), column("Share"));
  const rows = spans.map((span) =>
    make("tr", {},
      make("th", { scope: "row", "--depth": span.depth }, span.name, isOneService ? undefined : make("small", {}, ` ${span.service}`)),
      make("td", { class: "chart", "--step": step / total }, make("i", { class: span.kind, "--at": span.at / total, "--share": span.ms / total })),
      make("td", { class: "number" }, span.ms.toFixed(3)),
      make("td", { class: "number" }, percent(span.ms / total))));
  const legend = Object.entries(LEGEND).map(([kind, text]) => make("li", {}, make("i", { class: kind }), text));
  return [
    make("table", { class: "waterfall" }, make("caption", {}, "Where the time went"), make("thead", {}, head), make("tbody", {}, rows)),
    make("ul", { class: "legend", "aria-label": "Colours" }, legend),
    make("p", { class: "hint" }, `The browser waited ${waitedMs.toFixed(1)}\u00a0ms: ${(waitedMs - spans[0].ms).toFixed(1)}\u00a0ms of it outside of the gateway (network, HTTP, the browser).`),
  ];
}

/** Each batch of a trace, and its rows. `names`: what traces that the page knows are called. */
export function batches(trace, names) {
  return trace.batches.map(({ ms, attributes: batch, links }) => {
    const size = Number(batch["neuronpipe.batch.size"]);
    const isStep = !("neuronpipe.bucket.tokens" in batch); // of texts that are generated
    const known = Object.fromEntries(links.map((link) => [link["neuronpipe.batch.row"], link]));
    const mates = Array.from({ length: Math.min(size, MAX_MATES) }, (_, row) => {
      const mate = known[row];
      const whose = mate && (names[mate.traceId] ?? `trace ${mate.traceId.slice(0, 8)}…`);
      return make("li", {}, mate ? `${whose}, ${mate["neuronpipe.tokens"]} tokens` : isStep ? "another text" : "a request that is not sampled");
    });
    return make("div", { class: "batch" },
      make("p", {}, isStep ? `A step of ${size} on ${batch["neuronpipe.backend"]}: ${number(ms)}\u00a0ms, ${batch["neuronpipe.tokens"]} tokens` : `A batch of ${size} on ${batch["neuronpipe.backend"]}, core ${batch["neuronpipe.core"]}: ${number(ms)}\u00a0ms, padded to ${batch["neuronpipe.bucket.tokens"]} tokens, ${percent(Number(batch["neuronpipe.padding_ratio"]))} padding`),
      make("ol", { start: 0 }, mates, size > MAX_MATES ? make("li", {}, `and ${size - MAX_MATES} more`) : undefined));
  });
}
