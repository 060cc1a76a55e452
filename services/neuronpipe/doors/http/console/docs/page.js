// Shows /openapi.json by Swagger UI. Where the server asks for a key, so does the page, which keeps it in memory alone.
"use strict";

const form = document.getElementById("key-form");
const problem = document.getElementById("problem");
let key = "";

async function show() {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch("openapi.json", { headers });
  form.hidden = answer.ok;
  if (!answer.ok) {
    problem.textContent = answer.status !== 401 ? `openapi.json: status ${answer.status}` : key ? "not accepted" : "";
    return;
  }
  const spec = await answer.json();
  // A proxy may have put a prefix before the path of this page.
  spec.servers = [{ url: new URL(".", location.href).pathname.replace(/\/$/, "") || "/" }];
  SwaggerUIBundle({
    spec,
    dom_id: "#api",
    deepLinking: true,
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    validatorUrl: null,
    requestInterceptor: (request) => {
      if (key) request.headers.authorization = `Bearer ${key}`;
      return request;
    },
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  key = document.getElementById("key").value.trim();
  show();
});
show();
