#!/bin/sh
# Builds the Go client without modules, from Debian 12's packages, which README.md names: examples/go/build.sh OUT makes OUT/classify.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/src"
out=$(cd "$1" && pwd)
mkdir -p "$out/src/neuronpipe.example"
ln -sfn "$here" "$out/src/neuronpipe.example/go"
GO111MODULE=off GOFLAGS=-mod= GOPATH=$out:/usr/share/gocode GOCACHE=$out/cache \
  go build -tags debian12 -o "$out/classify" neuronpipe.example/go
