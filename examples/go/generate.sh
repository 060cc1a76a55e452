#!/bin/sh
# Writes examples/go/api from protos/. Debian 12 has its tools: protobuf-compiler 3.21.12, protoc-gen-go 1.28.1
# and protoc-gen-go-grpc 1.33.3.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
module="module=neuronpipe.example/go"
protoc -I"$here/../../protos" --go_out="$here" --go_opt="$module" --go-grpc_out="$here" --go-grpc_opt="$module" \
  neuronpipe/api/v1/inference.proto neuronpipe/api/v1/models.proto neuronpipe/api/v1/tasks.proto
