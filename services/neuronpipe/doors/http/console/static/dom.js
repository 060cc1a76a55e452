// Elements, made without HTML: what models and callers write stays text.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes (true: present, false or undefined: absent) and children, which are elements or text. */
export function make(tag, attributes = {}, ...children) {
  const made = ["svg", "path"].includes(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("--")) made.style.setProperty(name, value);
    else if (value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== undefined));
  return made;
}

export const find = (id) => document.getElementById(id);

/** A bar of a share from 0 to 1. */
export const bar = (share, attributes = {}) =>
  make("span", { class: "bar", ...attributes }, make("i", { "--share": Math.max(0, Math.min(1, share)) }));

/** Words of a name in a message: `top_k` is "Top k". */
export const words = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

export const hyphened = (name) => name.replaceAll("_", "-");

/** A number with three digits, or with all of those before its point. */
export const number = (value) =>
  value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0 });

/** As all values with a unit, with a space at which no line breaks. */
export const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)}\u00a0%`);
