// Classifies a text, or with the number of labels 0 continues it: a client of a gateway, with TLS, an API key, retries and
// a deadline. Usage: node classify.js HOST:PORT MODEL LABELS TEXT. In the environment: NEURONPIPE_API_KEY, and in CA the
// PEM file of the authority of the gateway's certificate.
if (process.argv.length !== 6) {
  console.error("usage: node classify.js HOST:PORT MODEL LABELS TEXT");
  process.exit(2);
}
const fs = require("fs");
const path = require("path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const protos = process.env.PROTOS ?? path.join(__dirname, "../../protos");
const definition = protoLoader.loadSync("neuronpipe/api/v1/inference.proto", { includeDirs: [protos], keepCase: true, longs: Number });
const { InferenceService } = grpc.loadPackageDefinition(definition).neuronpipe.api.v1;

// gRPC repeats these calls by itself, after the time that the server asks for.
const serviceConfig = {
  loadBalancingConfig: [{ round_robin: {} }],
  methodConfig: [{
    name: [{ service: "neuronpipe.api.v1.InferenceService" }],
    retryPolicy: {
      maxAttempts: 4, initialBackoff: "0.1s", maxBackoff: "2s", backoffMultiplier: 2,
      retryableStatusCodes: ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
    },
  }],
};

const [target, model, labels, text] = process.argv.slice(2);
const { CA: ca, NEURONPIPE_API_KEY: key } = process.env;
const credentials = ca ? grpc.credentials.createSsl(fs.readFileSync(ca)) : grpc.credentials.createInsecure();
const client = new InferenceService(target, credentials, {
  "grpc.service_config": JSON.stringify(serviceConfig),
  "grpc.max_receive_message_length": 64 << 20,
});
const metadata = new grpc.Metadata();
if (key) metadata.set("authorization", `Bearer ${key}`);
// The deadline covers all attempts. The server does not compute what cannot be ready in time.
const options = { deadline: Date.now() + 10_000 };

function fail(error) {
  // The code says what to do: change the request, wait, or try again.
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
  client.close();
}

if (Number(labels)) {
  const request = { model, input: { text_classification: { text, top_k: Number(labels) } } };
  client.Infer(request, metadata, options, (error, response) => {
    if (error) return fail(error);
    for (const { label, score } of response.result.text_classification.labels) console.log(label, score.toFixed(6));
    client.close();
  });
} else {
  const stream = client.Generate({ model, input: { text_generation: { prompt: text } } }, metadata, options);
  stream.on("data", (event) => process.stdout.write(event.chunk?.text ?? ""));
  stream.on("end", () => process.stdout.write("\n"));
  stream.on("error", fail);
}
