// How results are shown, and a sample of a chat.

import { bar, hyphened, make, number, percent } from "./dom.js";

const SCORES = 10;

const item = (name, share, text, attributes = {}) =>
  make("li", attributes, make("span", { class: "name" }, name), bar(share), make("span", { class: "number" }, text));

/** Scores, best first; logits, which no percentage can show, by their range. */
function scores(entries) {
  const values = entries.map((entry) => entry.score);
  const isShare = values.every((value) => value >= 0 && value <= 1);
  const [low, high] = [Math.min(0, ...values), Math.max(...values.map(Math.abs), Number.EPSILON)];
  const share = (value) => (isShare ? value : (value - low) / (high - low || 1));
  const shown = entries.slice(0, SCORES).map(({ name, score }) => item(name, share(score), isShare ? percent(score) : number(score)));
  return make("ol", { class: "scores" }, shown, entries.length > SCORES ? make("li", {}, `and ${entries.length - SCORES} more`) : undefined);
}

/** A text with marked parts, whose offsets count code points. */
function marked(text, parts) {
  const points = Array.from(text);
  const shown = [];
  let at = 0;
  for (const { start, end, label } of [...parts].sort((one, other) => one.start - other.start)) {
    if (start < at) continue; // inside of one that is marked already
    shown.push(points.slice(at, start).join(""), make("mark", {}, points.slice(start, end).join(""), label ? make("small", {}, ` ${label}`) : undefined));
    at = end;
  }
  return make("p", { class: "marked" }, ...shown, points.slice(at).join(""));
}

/** The numbers of a vector as bars up and down. */
function spectrum(vector) {
  const largest = vector.reduce((most, value) => Math.max(most, Math.abs(value)), Number.EPSILON);
  const path = vector.reduce((drawn, value, index) => `${drawn}M${index + 0.5} 0V${(-value / largest).toFixed(3)}`, "");
  const picture = { class: "spectrum", viewBox: `0 -1 ${vector.length} 2`, preserveAspectRatio: "none", role: "img" };
  return make("svg", { ...picture, "aria-label": `${vector.length} numbers` }, make("path", { d: path }));
}

function vectorFacts(vector) {
  const length = Math.hypot(...vector);
  const first = vector.slice(0, 6).map((value) => value.toFixed(4)).join(", ");
  return make("p", {}, `${vector.length} dimensions, length ${length.toFixed(4)}: [${first}, …]`);
}

/** The vectors of feature extraction: little-endian, of one of three types. */
function decodeVectors({ data, shape, type, scales }) {
  const view = new DataView(Uint8Array.from(atob(data), (one) => one.charCodeAt(0)).buffer);
  const width = shape.at(-1);
  const count = shape.length === 2 ? shape[0] : 1;
  const read = {
    FEATURE_TYPE_FLOAT32: (index) => view.getFloat32(4 * index, true),
    FEATURE_TYPE_FLOAT16: (index) => float16(view.getUint16(2 * index, true)),
    FEATURE_TYPE_INT8: (index) => view.getInt8(index) * scales[Math.floor(index / width)],
  }[type];
  return Array.from({ length: count }, (_, row) => Array.from({ length: width }, (_, column) => read(row * width + column)));
}

function float16(bits) {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const size = exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024);
  return bits >> 15 ? -size : size;
}

const SHOWN_VECTORS = 8;

/** Generated texts, with why each ended, its score in a beam search, and the log probabilities of their tokens. */
function written({ sequences }) {
  return sequences.map(({ text, finish_reason: reason, score, logprobs }) => [
    make("p", { class: "written" }, text),
    make("p", { class: "hint" }, `Ended by: ${hyphened(reason.slice("FINISH_REASON_".length).toLowerCase())}${score === undefined ? "" : `; score: ${number(score)}`}`),
    logprobs.length ? make("ol", { class: "scores" }, logprobs.map((one) => item(JSON.stringify(one.text), Math.exp(one.logprob), number(one.logprob)))) : undefined,
  ]);
}

function features(result) {
  const vectors = decodeVectors(result);
  const rest = vectors.length - SHOWN_VECTORS;
  return [
    make("p", {}, `${result.shape.join(" × ")} numbers${result.shape.length === 2 ? `: a vector for each ${result.chunks?.length ? "chunk" : "token"}` : ""}`),
    ...vectors.slice(0, SHOWN_VECTORS).map(spectrum),
    vectors.length === 1 ? vectorFacts(vectors[0]) : rest > 0 ? make("p", {}, `and ${rest} more`) : undefined,
  ];
}

export const CHAT = {
  messages: [{ role: "system", content: "Be brief." }, { role: "user", content: "What is a module?" }],
  options: { max_new_tokens: 40 },
};

// The first field of a result → how the result is shown. One of another shape is shown as JSON only.
const SHOWN = {
  labels: ({ labels }) => scores(labels.map(({ label, score }) => ({ name: label, score }))),
  embedding: ({ embedding }) => [spectrum(embedding), vectorFacts(embedding)],
  answers: ({ answers }, input) => [
    marked(input.context, answers.slice(0, 1)),
    scores(answers.map(({ text, score }) => ({ name: text || "no answer", score }))),
  ],
  entities: ({ entities }, input) => [
    marked(input.text, entities),
    entities.length ? scores(entities.map(({ text, label, score }) => ({ name: `${label}: ${text}`, score }))) : make("p", {}, "Nothing found."),
  ],
  masks: ({ masks }, input) => masks.map(({ tokens, ...place }) => [
    marked(input.text, [{ ...place, label: tokens[0]?.token }]),
    scores(tokens.map(({ token, score }) => ({ name: token, score }))),
  ]),
  data: features,
  scores: ({ scores: cosines }, input) => scores(cosines.map((score, index) => ({ name: input.texts[index], score }))),
  texts: ({ texts }, input) => scores(texts.map(({ index, score }) => ({ name: input.texts[index], score }))),
  weights: ({ weights }) => scores(weights.map(({ token, weight }) => ({ name: token, score: weight }))),
  sequences: written,
};

/** A result, for people. */
export const shown = (result, input) => Object.entries(SHOWN).find(([field]) => field in result)?.[1](result, input);
