// Runs cases with @grpc/grpc-js; see tests/interop/cases.py.
"use strict";

const fs = require("fs");
const readline = require("readline");
const zlib = require("zlib");
const grpc = require("@grpc/grpc-js");

const SMALL_BYTES = 16384;
const PERIOD = Buffer.from(Array.from({ length: 251 }, (_, number) => number));
const identity = (data) => data;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function requestsOf(call) {
  return call.requests.map((one) =>
    typeof one === "number" ? Buffer.alloc(one, PERIOD) : Buffer.from(one, "base64"));
}

function metadataOf(call) {
  const metadata = new grpc.Metadata();
  for (const [key, value] of call.metadata) {
    metadata.add(key, key.endsWith("-bin") ? Buffer.from(value, "base64") : value);
  }
  return metadata;
}

function credentialsOf(tls) {
  if (!tls) return grpc.credentials.createInsecure();
  const read = (path) => (path ? fs.readFileSync(path) : null);
  return grpc.credentials.createSsl(read(tls.ca), read(tls.key), read(tls.certificate));
}

function clientOf(testCase) {
  return new grpc.Client(testCase.target, credentialsOf(testCase.tls), {
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    // No retry policy. Without enable_retries 0, which would end the calls that Node.js has taken and not sent when a
    // GOAWAY comes, whatever a server does: gRPC's clients repeat those by themselves.
    "grpc.use_local_subchannel_pool": 1,
    ...(testCase.keepalive_ms && { "grpc.keepalive_time_ms": testCase.keepalive_ms }),
    ...(testCase.gzip && { "grpc.default_compression_algorithm": 2 }),
  });
}

async function send(running, call) {
  let isOver = false;
  let goOn = () => {};
  running.on("status", () => { isOver = true; goOn(); });
  running.on("drain", () => goOn());
  for (const [number, request] of requestsOf(call).entries()) {
    if (number && call.send_pause_ms) await sleep(call.send_pause_ms);
    if (isOver) return;
    if (!running.write(request)) await new Promise((resolve) => { goOn = resolve; });
  }
  running.end();
}

// Resolves to the status, the message, the trailers and the responses.
function callOnce(client, call) {
  const began = Date.now();
  const responses = [];
  const isStream = call.kind === "server" || call.kind === "bidi";
  const options = call.timeout_ms ? { deadline: began + call.timeout_ms } : {};
  const metadata = metadataOf(call);
  const received = (data) => responses.push(
    [data.length, zlib.crc32(data), data.length <= SMALL_BYTES ? data.toString("base64") : ""]);
  return new Promise((resolve) => {
    const answered = (error, data) => { if (data) received(data); };
    const of = [call.path, identity, identity];
    let running;
    switch (call.kind) {
      case "unary":
        running = client.makeUnaryRequest(...of, requestsOf(call)[0], metadata, options, answered);
        break;
      case "client":
        running = client.makeClientStreamRequest(...of, metadata, options, answered);
        break;
      case "server":
        running = client.makeServerStreamRequest(...of, requestsOf(call)[0], metadata, options);
        break;
      default:
        running = client.makeBidiStreamRequest(...of, metadata, options);
    }
    running.on("error", () => {}); // the status says it, too
    running.on("status", (status) => {
      const end = () => setImmediate(() => resolve({
        status: status.code,
        message: status.details,
        trailing: Object.entries(status.metadata.toHttp2Headers()).flatMap(
          ([key, values]) => [values].flat().map((value) => [key, value.toString()])),
        responses,
        seconds: (Date.now() - began) / 1000,
      }));
      // Responses that are not read yet come before the end.
      if (isStream && !status.code && !running.readableEnded) running.on("end", end);
      else end();
    });
    if (isStream) {
      running.on("data", (data) => {
        received(data);
        if (responses.length === call.cancel_after) running.cancel();
        if (call.read_pause_ms) {
          running.pause();
          setTimeout(() => running.resume(), call.read_pause_ms);
        }
      });
    }
    if (call.kind === "client" || call.kind === "bidi") send(running, call);
    if (call.cancel_after_ms) setTimeout(() => running.cancel(), call.cancel_after_ms);
  });
}

async function caller(client, call) {
  await sleep(call.start_ms);
  const ends = Date.now() + call.for_ms;
  const ended = [await callOnce(client, call)];
  while (Date.now() < ends) ended.push(await callOnce(client, call));
  return ended;
}

function outcomeOf(calls) {
  const worst = calls.find((one) => one.status) || calls[0];
  const statuses = {};
  for (const one of calls) statuses[one.status] = (statuses[one.status] || 0) + 1;
  return {
    statuses,
    message: worst.message,
    trailing: worst.trailing,
    responses: calls[0].responses,
    distinct: new Set(calls.map((one) => JSON.stringify(one.responses.map((of) => of.slice(0, 2))))).size,
    seconds: Math.max(...calls.map((one) => one.seconds)),
  };
}

async function run(testCase) {
  const clients = Array.from({ length: testCase.connections }, () => clientOf(testCase));
  const ended = await Promise.all(testCase.calls.map((call) => Promise.all(
    Array.from({ length: call.repeat }, (_, number) => caller(clients[number % clients.length], call)))));
  for (const client of clients) client.close();
  return ended.map((callers) => outcomeOf(callers.flat()));
}

(async () => {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    console.log(JSON.stringify({ outcomes: await run(JSON.parse(line)) }));
  }
})();
