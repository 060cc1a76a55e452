#!/bin/sh
# Builds the Go client: examples/go/build.sh OUT makes OUT/classify. Needs the Debian packages that README.md names.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
protos=$here/../../protos
mkdir -p "$1/src/classify"
out=$(cd "$1" && pwd)
package="neuronpipe/api/v1;neuronpipev1"
options="Mneuronpipe/api/v1/inference.proto=$package,Mneuronpipe/api/v1/tasks.proto=$package"
protoc -I"$protos" --go_out="$out/src" --go_opt="$options" --go-grpc_out="$out/src" --go-grpc_opt="$options" \
  neuronpipe/api/v1/inference.proto neuronpipe/api/v1/tasks.proto
cp "$here/main.go" "$out/src/classify/"
# Debian's Go packages are sources under /usr/share/gocode. With Go modules, go.mod names their versions instead.
GO111MODULE=off GOFLAGS=-mod= GOPATH=$out:/usr/share/gocode GOCACHE=$out/cache go build -o "$out/classify" classify
