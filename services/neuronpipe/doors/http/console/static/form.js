// A form for a task's input, made of its schema in /openapi.json, which is made of the protos.

import { make, words } from "./dom.js";

const MESSAGES = "messages";

/** The properties of a message with their schemas; those of a message in it by their path, as `options.top_k`. */
export function entriesOf(schema, schemaOf, path = "") {
  return Object.entries(schema.properties).flatMap(([name, one]) => {
    if (one.$ref) return entriesOf(schemaOf(one), schemaOf, `${path}${name}.`);
    const isOfMessages = one.items?.$ref && name !== MESSAGES; // of such lists, the form knows that of a chat
    return isOfMessages ? [] : [[path + name, one]];
  });
}

/** The value at a path. */
export const valueAt = (value, path) => path.split(".").reduce((one, name) => one?.[name], value);

/** The field of one property. `isLong`: whether a text may have many lines. */
export function field(path, schema, value, isLong) {
  const id = `field-${path.replace(".", "-")}`;
  const name = path.split(".").at(-1);
  const shared = { id, name: path, "aria-describedby": `${id}-text` };
  const text = make("small", { id: `${id}-text` }, schema.description);
  const control = controlOf(schema, value, isLong, shared);
  if (schema.type === "boolean") return make("div", { class: "field" }, make("label", {}, control, " ", words(name)), text);
  const label = make("label", { for: id }, words(name), schema.type === "array" ? make("span", { class: "hint" }, schema.items.$ref ? " one a line, as user: Hello" : " one a line") : undefined);
  return make("div", { class: "field" }, label, control, text);
}

function controlOf(schema, value, isLong, attributes) {
  if (schema.enum) return choice(schema.enum, value, attributes);
  if (schema.type === "boolean") return make("input", { type: "checkbox", checked: value, ...attributes });
  if (schema.type === "integer") return make("input", { type: "number", min: 0, value, placeholder: "default", ...attributes });
  if (schema.type === "number") return make("input", { type: "number", step: "any", value, placeholder: "default", ...attributes });
  if (schema.contentEncoding) return picture(attributes);
  if (schema.items?.$ref) return make("textarea", { rows: 3, ...attributes }, (value ?? []).map(({ role, content }) => `${role}: ${content}`).join("\n"));
  if (schema.type === "array") return make("textarea", { rows: 3, ...attributes }, (value ?? []).join("\n"));
  return isLong ? make("textarea", { rows: 2, ...attributes }, value ?? "") : make("input", { value, ...attributes });
}

function choice(values, value, attributes) {
  const prefix = values[0].slice(0, -"UNSPECIFIED".length);
  const option = (one, index) =>
    make("option", { value: index ? one : "", selected: one.slice(prefix.length).toLowerCase() === value }, index ? words(one.slice(prefix.length).toLowerCase()) : "default");
  return make("select", attributes, values.map(option));
}

/** A file to choose, or a sample. Its bytes in Base64 are the input's `data-value`. */
function picture(attributes) {
  const input = make("input", { type: "file", accept: "image/jpeg,image/png,image/webp", ...attributes });
  const preview = make("img", { class: "preview", alt: "The picture that is sent", hidden: true });
  const show = async (file) => {
    URL.revokeObjectURL(preview.src);
    preview.src = URL.createObjectURL(file);
    preview.hidden = false;
    input.dataset.value = await base64(file);
    input.dispatchEvent(new Event("input", { bubbles: true }));
  };
  input.addEventListener("change", () => input.files[0] && show(input.files[0]));
  const sample = make("button", { type: "button" }, "Use a sample picture");
  sample.addEventListener("click", () => drawSample().toBlob(show));
  return make("div", { class: "picture" }, input, sample, preview);
}

const base64 = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

/** A sun above hills. */
function drawSample() {
  const canvas = make("canvas", { width: 224, height: 224 });
  const draw = canvas.getContext("2d");
  const sky = draw.createLinearGradient(0, 0, 0, 224);
  sky.addColorStop(0, "#3b78c2");
  sky.addColorStop(1, "#f3d9a4");
  const disc = (colour, ...circle) => {
    draw.fillStyle = colour;
    draw.beginPath();
    draw.arc(...circle, 0, 2 * Math.PI);
    draw.fill();
  };
  draw.fillStyle = sky;
  draw.fillRect(0, 0, 224, 224);
  disc("#ffe27a", 150, 78, 34);
  disc("#3d6b45", 60, 300, 150);
  disc("#2c5136", 200, 310, 140);
  return canvas;
}

/** What the fields hold, as a message's JSON: what is left empty is not set. */
export function valuesOf(form, entries) {
  const values = {};
  for (const [path, one] of entries) {
    const control = form.elements[path];
    const value = control && valueOf(control, one);
    if (value === undefined) continue;
    const names = path.split(".");
    const last = names.pop();
    names.reduce((inside, name) => (inside[name] ??= {}), values)[last] = value;
  }
  return values;
}

/** The messages of a chat. A line that names no role belongs to the message before. */
function messagesOf(text) {
  const messages = [];
  for (const line of text.split("\n")) {
    const [, role, content] = /^(\w+): ?(.*)$/.exec(line) ?? [];
    if (role) messages.push({ role, content });
    else if (messages.length) messages.at(-1).content += `\n${line}`;
    else messages.push({ role: "user", content: line });
  }
  return messages;
}

function valueOf(control, schema) {
  if (schema.type === "boolean") return control.checked || undefined;
  if (schema.contentEncoding) return control.dataset.value;
  if (control.value === "") return undefined;
  if (schema.type === "integer" || schema.type === "number") return Number(control.value);
  if (schema.items?.$ref) return messagesOf(control.value);
  if (schema.items?.type === "integer") return control.value.split(/\s+/).filter(Boolean).map(Number);
  if (schema.type === "array") return control.value.split("\n").filter((line) => line !== "");
  return control.value;
}
