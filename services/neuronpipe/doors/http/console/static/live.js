// The live panel: figures of the server's metrics, once a second, while the page is seen and not paused.

import { Problem, listen } from "./api.js";
import { find, make, number, percent } from "./dom.js";

const HISTORY = 60;
const RETRY_MS = 3000;
const ELSEWHERE = "measured in the neuron-executor's own process";

// A tile: its name, its number of an event, how the number is written, and what else is said.
const TILES = [
  ["Requests a second", (live) => live.requests_per_s, number, (live) => `${number(live.errors_per_s)} with an error`],
  ["Latency p50, ms", (live) => live.stages.request.p50_ms, number, (live) => `p99 ${number(live.stages.request.p99_ms)}\u00a0ms`],
  ["In flight", (live) => live.in_flight, number, (live) => `${number(live.tokens_in_flight)} tokens`],
  ["Queue, sequences", (live) => live.queue_sequences, number, (live) => (live.queue_tokens === null ? ELSEWHERE : `${number(live.queue_tokens)} tokens`)],
  ["Batch size, mean", (live) => live.batch_size, number, (live) => (live.queue_sequences === null ? ELSEWHERE : `${number(live.busy_cores)} cores busy`)],
  ["Padding", (live) => live.padding_ratio, percent, (live) => (live.queue_sequences === null ? ELSEWHERE : "of the computed tokens")],
  ["Shed a second", (live) => live.shed_per_s, number, (live) => `${number(live.expired_per_s)} past their deadline`],
  ["Token cache hits", (live) => live.token_cache_hits, percent, (live) => `results ${percent(live.result_cache_hits)}`],
];
const STAGES = { request: "gateway", preprocess: "preprocess", predict: "predict", "predict.queue": "queue", "predict.compute": "compute", postprocess: "postprocess" };

/** Starts the panel. */
export function startLive() {
  const history = TILES.map(() => []);
  const model = find("live-model");
  const pause = find("pause");
  let listening = new AbortController();
  find("tiles").append(...TILES.map(([name]) =>
    make("div", { class: "card tile" }, make("dt", {}, name), make("dd", {}, make("b", {}, "–")), make("dd", { class: "hint" }),
      make("dd", {}, make("svg", { viewBox: `0 0 ${HISTORY - 1} 1`, preserveAspectRatio: "none", "aria-hidden": true }, make("path"))))));

  const restart = () => {
    listening.abort();
    listening = new AbortController();
    const isPaused = pause.getAttribute("aria-pressed") === "true";
    if (isPaused) tell("paused", "");
    else if (!document.hidden) run(listening.signal);
  };
  const run = async (signal) => {
    while (!signal.aborted) {
      try {
        for await (const live of listen(`console/live?model=${encodeURIComponent(model.value)}`, { signal })) {
          tell("live", "good");
          show(live, history);
        }
      } catch (error) {
        if (signal.aborted) return;
        tell(error instanceof Problem ? error.message : "the stream of live figures broke", "bad");
      }
      if (!signal.aborted) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  };
  model.addEventListener("change", () => {
    history.forEach((values) => values.splice(0));
    restart();
  });
  pause.addEventListener("click", () => {
    pause.setAttribute("aria-pressed", pause.getAttribute("aria-pressed") === "false");
    restart();
  });
  document.addEventListener("visibilitychange", restart);
  restart();
}

/** Says how the stream is, once: the place is read aloud. */
function tell(text, kind) {
  const status = find("status");
  if (status.textContent === text) return;
  status.textContent = text;
  status.className = kind;
}

function show(live, history) {
  [...find("tiles").children].forEach((tile, index) => {
    const [, read, write, hint] = TILES[index];
    const value = read(live);
    const values = history[index];
    values.push(value ?? 0);
    if (values.length > HISTORY) values.shift();
    tile.querySelector("b").textContent = write(value);
    tile.querySelector(".hint").textContent = hint(live);
    tile.querySelector("path").setAttribute("d", line(values));
  });
  find("stages").tBodies[0].replaceChildren(...Object.entries(STAGES).map(([stage, kind]) => {
    const { p50_ms, p95_ms, p99_ms } = live.stages[stage];
    const numbers = [p50_ms, p95_ms, p99_ms].map((value) => make("td", { class: "number" }, number(value)));
    return make("tr", {}, make("th", { scope: "row" }, make("i", { class: kind }), stage), numbers);
  }));
}

/** A line to the right edge, of values from 0 to their largest. */
function line(values) {
  const largest = Math.max(...values, Number.EPSILON);
  return values.map((value, index) => `${index ? "L" : "M"}${HISTORY - values.length + index} ${(0.95 - (0.9 * value) / largest).toFixed(3)}`).join("");
}
