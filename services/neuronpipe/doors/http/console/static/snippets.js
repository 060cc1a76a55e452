// The call of the form, for other clients to copy.

const PICTURE = "picture that is read from a file";
const FILE = "picture.jpg";

/** The request as code of each language. `http`: the URL of /v1/infer; `grpc`: HOST:PORT. */
export const LANGUAGES = { grpcurl, Python: python, curl, Node: node };

const hasImage = (request) => Object.values(request.input).some((fields) => "image" in fields);

/** The request as JSON, with the expression of a picture's bytes in the place of its Base64. */
function json(request, indent, picture) {
  const text = JSON.stringify(request, (name, value) => (name === "image" ? PICTURE : value), indent);
  return text.replace(`"${PICTURE}"`, () => picture);
}

/** JSON as the standard input of a command. Only of a picture the shell has anything to put in. */
function here(request) {
  const end = hasImage(request) ? "END" : "'END'";
  return `<<${end}\n${json(request, 2, `"$(base64 < ${FILE} | tr -d '\\n')"`)}\nEND`;
}

function grpcurl(request, { grpc }) {
  return `grpcurl -plaintext -d @ ${grpc} \\\n  neuronpipe.api.v1.InferenceService/Infer ${here(request)}`;
}

function curl(request, { http }) {
  return `curl ${http} -H 'Content-Type: application/json' -d @- ${here(request)}`;
}

function python(request, { grpc }) {
  const literal = (value) =>
    json(value, 4, `Path("${FILE}").read_bytes()`)
      .replace(/"(?:\\.|[^"\\])*"|\btrue\b|\bfalse\b/g, (found) => ({ true: "True", false: "False" })[found] ?? found)
      .replaceAll("\n", "\n    ");
  const fields = Object.entries(request).map(([name, value]) => `    ${name}=${literal(value)},\n`);
  const path = hasImage(request) ? "from pathlib import Path\n\n" : "";
  return `${path}from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.client import Client

request = InferRequest(
${fields.join("")})
with Client("${grpc}") as client:
    print(client.infer(request))`;
}

function node(request, { http }) {
  const read = hasImage(request) ? 'import { readFile } from "node:fs/promises";\n\n' : "";
  const body = json(request, 2, `await readFile("${FILE}", "base64")`).replaceAll("\n", "\n  ");
  return `${read}const response = await fetch("${http}", {
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(${body}),
});
console.log(JSON.stringify(await response.json(), null, 2));`;
}
