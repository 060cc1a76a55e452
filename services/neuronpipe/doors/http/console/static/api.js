// Requests to the server that the page came from.

/** What the server refused a request with, in its own words: the fields of a problem (RFC 9457). */
export class Problem extends Error {
  constructor(details) {
    super(details.detail);
    this.details = details;
  }
}

const KEY = "neuronpipe-key";

/** Sends an API key or a token with all later requests, until the tab is closed. */
export const useKey = (key) => sessionStorage.setItem(KEY, key.trim());

/** Every request of the page. `json`: a body to post. Throws Problem. */
export async function ask(path, { json, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  if (key) options = { ...options, headers: { authorization: `Bearer ${key}`, ...options.headers } };
  if (json !== undefined) {
    options = { ...options, method: "POST", body: JSON.stringify(json), headers: { "content-type": "application/json", ...options.headers } };
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ reason: "NOT_REACHED", detail: "The server cannot be reached." });
  }
  if (!response.ok) {
    const found = await response.json().catch(() => ({}));
    throw new Problem({ status: response.status, reason: "HTTP", detail: response.statusText, ...found });
  }
  return response;
}

/** The server-sent events of a stream, until it ends. Not by EventSource, which cannot send headers. */
export async function* listen(path, options) {
  const reader = (await ask(path, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (text + part.value).split("\n\n");
    text = events.pop();
    for (const event of events) yield JSON.parse(event.slice("data: ".length));
  }
}
