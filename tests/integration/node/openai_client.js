// Calls the HTTP door with OpenAI's package for Node.js. Prints one JSON object of what it reads.
// Usage: node openai_client.js URL WRITER_URL, then as JSON: the texts, the chat, the most tokens and a schema
const OpenAI = require("openai");

const [url, writerUrl, given] = process.argv.slice(2);
const { texts, messages, max_tokens, schema } = JSON.parse(given);

async function main() {
  const vectors = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
  const writer = new OpenAI({ baseURL: `${writerUrl}/v1`, apiKey: "none" });
  const asked = { model: "writer", messages, max_tokens };
  const formed = { ...asked, max_tokens: 120, seed: 6 };
  const tools = [{ type: "function", function: { name: "thing", parameters: schema } }];
  const response_format = { type: "json_schema", json_schema: { name: "thing", schema, strict: true } };
  let stream = "";
  for await (const chunk of await writer.chat.completions.create({ ...asked, stream: true })) {
    stream += chunk.choices[0]?.delta.content ?? "";
  }
  const final = await writer.chat.completions.stream(asked).finalContent();
  const embedded = await vectors.embeddings.create({ model: "minilm", input: texts });
  const called = await writer.chat.completions.create({ ...formed, tools, tool_choice: "required" });
  const response = await writer.responses.create({ model: "writer", input: messages, max_output_tokens: max_tokens });
  const refused = await vectors.embeddings.create({ model: "unknown", input: "a" }).catch((error) => error);
  console.log(
    JSON.stringify({
      embeddings: embedded.data.map((one) => one.embedding),
      models: (await vectors.models.list()).data.map((one) => one.id),
      chat: (await writer.chat.completions.create(asked)).choices[0].message.content,
      stream,
      final,
      response: response.output_text,
      form: (await writer.chat.completions.create({ ...formed, response_format })).choices[0].message.content,
      call: called.choices[0].message.tool_calls[0].function,
      refused: [refused.status, refused.code],
    }),
  );
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
