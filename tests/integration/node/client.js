// Calls a gateway for all three tasks with nothing of this repository but protos/. Prints one JSON object.
// Usage: node client.js HOST:PORT PROTOS_FOLDER
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [target, protos] = process.argv.slice(2);
const definition = protoLoader.loadSync(path.join(protos, "neuronpipe/api/v1/inference.proto"), {
  includeDirs: [protos],
  keepCase: true,
  longs: Number,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).neuronpipe.api.v1;
const client = new InferenceService(target, grpc.credentials.createInsecure());

function infer(request) {
  return new Promise((resolve, reject) =>
    client.Infer(request, { deadline: Date.now() + 20_000 }, (error, response) =>
      error ? reject(error) : resolve(response),
    ),
  );
}

async function main() {
  const run = (model, input) => infer({ model, input });
  const classified = await run("classifier", { text_classification: { text: "The cat sat.", top_k: 2 } });
  const embedded = await run("minilm", { sentence_embedding: { text: "The cat sat.", dimensions: 8 } });
  const context = "Der Kater 🐈 heißt Mikesch. Er wohnt in Holleschitz.";
  const answered = await run("answerer", { question_answering: { question: "Wie heißt er?", context } });
  const refused = await run("classifier", { text_classification: { text: "" } }).catch((error) => error);
  console.log(
    JSON.stringify({
      labels: classified.result.text_classification.labels,
      embedding: embedded.result.sentence_embedding.embedding,
      answers: answered.result.question_answering.answers,
      context,
      total_ns: answered.timings.total_ns,
      refused: { code: refused.code, details: refused.details },
    }),
  );
  client.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
