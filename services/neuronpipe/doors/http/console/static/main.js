// The console: what is chosen, sent, and shown.

import { Problem, ask, listen, useKey } from "./api.js";
import { find, hyphened, make, number, percent } from "./dom.js";
import { entriesOf, field, valueAt, valuesOf } from "./form.js";
import { startLive } from "./live.js";
import { LANGUAGES } from "./snippets.js";
import { newTrace, readTrace, spansOfTimings } from "./spans.js";
import { CHAT, shown } from "./tasks.js";
import { batches, waterfall } from "./waterfall.js";

// The fields of a request that the form has besides the input.
const REQUEST_FIELDS = ["version", "priority", "cache_control"];
const MAX_SHOWN_TEXT = 200;
const SHOWN_LABELS = 5;
const MODELS_EVERY_MS = 2000;

const form = find("form");
const [state, openapi] = await Promise.all(["console/state", "openapi.json"].map(async (path) => (await ask(path)).json())).catch((error) => {
  showProblem(error.details);
  throw error;
});
const schemaOf = ({ $ref }) => openapi.components.schemas[$ref.split("/").at(-1)];
const requestSchema = schemaOf(openapi.paths["/v1/infer"].post.requestBody.content["application/json"].schema);
const optionEntries = REQUEST_FIELDS.map((name) => [name, requestSchema.properties[name]]);
const inputSchema = (task) => schemaOf(schemaOf(requestSchema.properties.input).properties[task]);
const inputEntries = (task) => entriesOf(inputSchema(task), schemaOf);
const models = state.models.filter((model) => model.is_default);
const places = { http: new URL("v1/infer", document.baseURI).href, grpc: `${location.hostname}:${state.grpc_port}` };

const chosenModel = () => models.find((model) => model.name === find("model").value);

/** The request of the form, as JSON. */
function readRequest() {
  const task = find("task").value;
  const input = { [task]: valuesOf(form, inputEntries(task)) };
  return { model: find("model").value, input, ...valuesOf(form, optionEntries) };
}

function showTasks() {
  find("task").replaceChildren(...chosenModel().tasks.map((task) => make("option", { value: task }, hyphened(task))));
  showFields();
}

/** A task's sample as it fits the model. */
function sampleOf(task, { mask_token: mask, labels, has_chat_template: hasChats }) {
  const sample = state.samples[task];
  if (hasChats && "prompt" in sample) return CHAT;
  if (mask) return { ...sample, text: sample.text.replace("[MASK]", mask) };
  return labels.length && "top_k" in sample ? { ...sample, top_k: Math.min(SHOWN_LABELS, labels.length) } : sample;
}

/** The fields of the task: those that its sample has, and the others as options. */
function showFields() {
  const task = find("task").value;
  const sample = sampleOf(task, chosenModel());
  const isInSample = ([path]) => path.split(".").at(-1) in (path.includes(".") ? sample[path.split(".")[0]] ?? {} : sample);
  const entries = inputEntries(task);
  find("fields").replaceChildren(...entries.filter(isInSample).map(([path, schema]) => field(path, schema, valueAt(sample, path), true)));
  const options = [...entries.filter((entry) => !isInSample(entry)), ...optionEntries];
  find("options").replaceChildren(...options.map(([path, schema]) => field(path, schema, undefined, false)));
  showCode();
}

function showCode() {
  const language = form.ownerDocument.querySelector("#languages :checked").value;
  find("code").textContent = LANGUAGES[language](readRequest(), places);
  find("copied").textContent = "";
}

async function send() {
  const request = readRequest();
  const copies = Number(find("copies").value) || 1;
  form.querySelectorAll("[aria-invalid]").forEach((control) => control.removeAttribute("aria-invalid"));
  find("answer").setAttribute("aria-busy", "true");
  find("send").disabled = true;
  find("summary").textContent = "Waiting for the answer.";
  const sent = await Promise.all(Array.from({ length: copies }, (_, copy) => sendOne(request, copy === 0)));
  await show(request, sent);
  find("answer").setAttribute("aria-busy", "false");
  find("send").disabled = false;
  find("answer").scrollIntoView({ block: "nearest" });
  if (sent.some((one) => one.problem)) goTo(sent.find((one) => one.problem).problem.field);
}

/** What became of a request: its response or problem, its trace's id, and how long the browser waited for it. */
async function sendOne(request, isShown) {
  const { id, traceparent } = newTrace();
  const began = performance.now();
  const options = { json: request, headers: state.keeps_traces ? { traceparent } : {} };
  const [task] = Object.keys(request.input);
  const answer = "options" in inputSchema(task).properties ? generate(options, isShown) : ask("v1/infer", options).then((answered) => answered.json());
  const told = await answer.then((response) => ({ response })).catch(problemOf);
  return { ...told, id, waitedMs: performance.now() - began };
}

/** The response to a request whose text is shown as it comes: the first one, where there are several. */
async function generate(options, isShown) {
  const text = make("p", { class: "coming" });
  if (isShown) find("answered").replaceChildren(text);
  for await (const { chunk, response, ...other } of listen("v1/generate", options)) {
    if (response) return response;
    if (chunk?.sequence === 0) text.append(chunk.text);
    if (other.detail) throw new Problem(other);
  }
  throw new Problem({ reason: "UNAVAILABLE", detail: "The stream ended before the text was complete." });
}

function problemOf(error) {
  if (!(error instanceof Problem)) throw error;
  return { problem: error.details };
}

/** Shows the last of what was sent to be answered, or what failed. */
async function show(request, sent) {
  const last = sent.find((one) => one.problem) ?? sent.reduce((one, other) => (other.waitedMs > one.waitedMs ? other : one));
  const trace = state.keeps_traces ? await findTrace(last.id) : undefined;
  const names = Object.fromEntries(sent.map((one) => [one.id, one === last ? "this request" : "a copy of it"]));
  const spans = trace?.spans ?? (last.response && spansOfTimings(last.response.timings));
  const details = [...(spans ? waterfall(spans, last.waitedMs) : []), ...(trace ? batches(trace, names) : [])];
  if (last.problem) showProblem(last.problem, details);
  else showAnswer(request, last.response, sent.length, details);
}

const findTrace = (id) =>
  ask(`console/traces/${id}`).then(async (found) => readTrace(await found.json(), id)).catch((error) => void problemOf(error));

function showAnswer(request, response, copies, details) {
  const [[task, input]] = Object.entries(request.input);
  const total = (Number(response.timings.total_ns) / 1e6).toFixed(1);
  find("summary").textContent = `${response.model} version ${response.version} answered in ${total}\u00a0ms${copies > 1 ? `, the last of ${copies}` : ""}.`;
  find("answered").replaceChildren(
    make("div", { class: "result" }, ...[shown(response.result[task], input)].flat(2).filter(Boolean)),
    ...details,
    make("h4", {}, "Batch and caches"),
    make("dl", { class: "facts" }, ...facts(response).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
    make("details", {}, make("summary", {}, "The response as JSON"), make("pre", { tabindex: 0 }, readable(response))),
  );
}

/** What a response says of its batch and of caches; of a generated text, of its tokens. */
function facts({ usage, timings }) {
  const cache = (outcome) => outcome.slice("CACHE_OUTCOME_".length).toLowerCase().replace("unspecified", "not used").replace("_", " in ");
  const padding = usage.padded_tokens ? percent(1 - usage.tokens / usage.padded_tokens) : "–";
  const dropped = usage.truncated_tokens ? `, ${number(usage.truncated_tokens)} dropped` : "";
  const computed = usage.batch_size > 0;
  if (usage.generated_tokens) {
    const ms = (ns) => `${(Number(ns) / 1e6).toFixed(1)}\u00a0ms`;
    return [
      ["First token", ms(timings.first_token_ns)],
      ["Between tokens", usage.generated_tokens > 1 ? ms(timings.decode_ns / (usage.generated_tokens + usage.discarded_tokens - 1)) : "–"],
      ["Longest gap", ms(timings.longest_gap_ns)],
      ["Tokens", `${number(usage.tokens)} + ${number(usage.generated_tokens)}${dropped}`],
      ["Of the prompt, from the cache", number(usage.cached_tokens)],
      ["Steps", number(usage.steps)],
    ];
  }
  return [
    ["Batch size", !computed ? "not computed" : usage.batch_size > 1 ? `${number(usage.batch_size)} sequences` : "alone"],
    ["Bucket", computed ? `${number(usage.bucket_tokens)} tokens` : "–"],
    ["Tokens", `${number(usage.tokens)}${dropped}`],
    ["Padding", computed ? padding : "–"],
    ["Token cache", cache(usage.token_cache)],
    ["Result cache", cache(usage.result_cache)],
  ];
}

/** JSON with numbers in lines and long texts cut. */
function readable(value) {
  const cut = (_, one) => (typeof one === "string" && one.length > MAX_SHOWN_TEXT ? `${one.slice(0, MAX_SHOWN_TEXT)}… (${one.length} characters)` : one);
  return JSON.stringify(value, cut, 2).replace(/\[\s+([-+\d.eE,\s]+?)\s+\]/g, (_, numbers) => `[${numbers.replace(/\s+/g, " ")}]`);
}

/** Asks for the key that the server wants. */
function keyForm() {
  const key = make("input", { id: "key", type: "password", autocomplete: "off" });
  const asked = make("form", { class: "field" }, make("label", { for: "key" }, "API key or token"), key, make("button", { class: "primary" }, "Use it"));
  asked.addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(key.value);
    location.reload();
  });
  return asked;
}

/** Shows an error as the server words it. */
function showProblem({ status, reason, detail }, details = []) {
  find("summary").textContent = "The request failed.";
  const heading = make("strong", {}, `${reason}${status ? `, HTTP ${status}` : ""}`);
  find("answered").replaceChildren(make("div", { class: "problem", role: "alert" }, heading, make("p", {}, detail)), ...(status === 401 ? [keyForm()] : []), ...details);
}

/** Marks the field that an error names, and goes there. */
function goTo(path = "") {
  const whole = path.replace(/\[\d+\].*$/, "");
  const control = whole && (form.elements[whole] ?? form.elements[whole.split(".").at(-1)]);
  if (!control) return;
  control.closest("details")?.setAttribute("open", "");
  control.setAttribute("aria-invalid", "true");
  control.focus();
}

/** What a version is doing, and which requests it gets. */
function stateOf(model) {
  const told = [
    model.aliases.join(", "),
    model.share ? `${percent(model.share)} of requests` : "",
    model.shadow_share ? `copies of ${percent(model.shadow_share)}` : "",
  ].filter(Boolean);
  const word = model.state.replace("VERSION_STATE_", "").toLowerCase();
  return [word, ...told.map((line) => make("small", {}, line)), model.problem ? make("small", {}, model.problem) : undefined];
}

function showModels(shown) {
  find("models-rows").replaceChildren(...shown.map((model) => {
    const takes = "image" in (state.samples[model.task] ?? {}) ? "a picture" : model.max_tokens ? `at most ${number(model.max_tokens)} tokens` : "–";
    const fields = model.tasks.map((task) => inputEntries(task).map(([path]) => path).filter((path) => path in state.samples[task] && path !== "top_k" && path !== "aggregation").join(", "));
    const gives = [
      model.labels.length ? `labels: ${model.labels.slice(0, 6).join(", ")}${model.labels.length > 6 ? `, … (${model.labels.length})` : ""}` : "",
      model.embedding_dimensions ? `${number(model.embedding_dimensions)} dimensions` : "",
      model.mask_token ? `words for ${model.mask_token}` : "",
    ].filter(Boolean).join("; ");
    const open = make("button", { type: "button" }, "Try", make("span", { class: "unseen" }, ` ${model.name}`));
    open.addEventListener("click", () => {
      find("model").value = model.name;
      showTasks();
      find("try").scrollIntoView();
      form.querySelector("textarea, input").focus();
    });
    return make("tr", {},
      make("th", { scope: "row" }, model.name, make("small", {}, `version ${model.version}`), model.is_default && chosenIsKnown(model) ? open : undefined),
      make("td", {}, stateOf(model)),
      make("td", {}, model.tasks.map((task, index) => make("div", {}, make("b", {}, hyphened(task)), make("small", {}, fields[index])))),
      make("td", {}, takes),
      make("td", {}, gives || "–"),
      make("td", {}, `${model.backends.join(", ")} ${model.dtype}`, make("small", { title: model.digest }, `${model.architecture}, ${model.digest.slice(0, 12)}`)));
  }));
}

/** Whether the form can ask a model: one that came later is known when the page is opened again. */
const chosenIsKnown = ({ name }) => models.some((model) => model.name === name);

/** Shows the versions as they are now, while somebody looks. */
async function followModels() {
  let shown = JSON.stringify(state.models);
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, MODELS_EVERY_MS));
    if (document.hidden) continue;
    const found = await ask("console/state").then((response) => response.json()).catch(() => undefined);
    const now = JSON.stringify(found?.models);
    if (!found || now === shown) continue;
    shown = now;
    showModels(found.models);
  }
}

find("version").textContent = `${state.version} · gRPC ${places.grpc}`;
find("model").append(...models.map((model) => make("option", {}, model.name)));
find("live-model").append(...models.map((model) => make("option", {}, model.name)));
find("languages").append(...Object.keys(LANGUAGES).map((language, index) =>
  make("label", {}, make("input", { type: "radio", name: "language", value: language, checked: !index }), language)));
find("model").addEventListener("change", showTasks);
find("task").addEventListener("change", showFields);
find("languages").addEventListener("change", showCode);
form.addEventListener("input", showCode);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
find("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(find("code").textContent);
    find("copied").textContent = "Copied.";
  } catch { // only pages of HTTPS and of this machine may write there
    getSelection().selectAllChildren(find("code"));
    find("copied").textContent = "Selected: copy it with Ctrl C.";
  }
});
showTasks();
showModels(state.models);
followModels();
startLive();
