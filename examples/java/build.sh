#!/bin/sh
# Builds the Java client: examples/java/build.sh OUT makes OUT/classes and OUT/classpath. It needs the Debian packages
# that README.md names.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
protos=$here/../../protos
for program in protoc grpc_java_plugin javac; do
  command -v "$program" >/dev/null || { echo "$program is not installed; examples/README.md has the apt-get line" >&2; exit 1; }
done
for jar in grpc-netty grpc-protobuf protobuf guava; do
  [ -e "/usr/share/java/$jar.jar" ] || { echo "$jar.jar is not installed; examples/README.md has the apt-get line" >&2; exit 1; }
done
mkdir -p "$1/generated" "$1/classes"
out=$(cd "$1" && pwd)
protoc -I"$protos" --java_out="$out/generated" --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" \
  --grpc-java_out="$out/generated" \
  neuronpipe/api/v1/inference.proto neuronpipe/api/v1/models.proto neuronpipe/api/v1/tasks.proto google/rpc/status.proto \
  google/rpc/error_details.proto
# Debian's jars lie in one folder. With Maven or Gradle: io.grpc:grpc-netty-shaded, grpc-protobuf and grpc-stub.
classpath=$out/classes
for name in grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub protobuf guava \
  failureaccess netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-common netty-handler netty-resolver \
  netty-transport netty-transport-native-unix-common opencensus-api opencensus-contrib-grpc-metrics perfmark-api \
  perfmark-impl geronimo-annotation-1.3-spec; do
  classpath=$classpath:/usr/share/java/$name.jar
done
find "$out/generated" "$here/src" -name '*.java' > "$out/sources"
javac -nowarn -Xlint:-deprecation -cp "$classpath" -d "$out/classes" "@$out/sources"
echo "$classpath" > "$out/classpath"
