// Runs cases with grpc-java; see tests/interop/cases.py.

import com.google.gson.Gson;
import com.google.gson.JsonElement;
import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.netty.GrpcSslContexts;
import io.grpc.netty.NettyChannelBuilder;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executors;
import java.util.concurrent.Semaphore;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.zip.CRC32;

public final class Client {
    static final int SMALL_BYTES = 16384;
    static final Gson GSON = new Gson();
    static final ScheduledExecutorService TIMERS = Executors.newScheduledThreadPool(4, Client::daemon);

    static final class Call {
        String path, kind;
        List<JsonElement> requests;
        List<List<String>> metadata;
        int timeout_ms, start_ms, cancel_after_ms, cancel_after, send_pause_ms, read_pause_ms, repeat, for_ms;
    }

    static final class Case {
        String target;
        Map<String, String> tls;
        int connections, keepalive_ms;
        boolean gzip;
        List<Call> calls;
    }

    // A call, as it ends.
    static final class One {
        int status;
        String message;
        List<List<String>> trailing = new ArrayList<>();
        List<List<Object>> responses = new ArrayList<>();
        double seconds;
    }

    static final class Outcome {
        Map<String, Integer> statuses = new HashMap<>();
        String message;
        List<List<String>> trailing;
        List<List<Object>> responses;
        int distinct;
        double seconds;
    }

    // Messages are bytes.
    static final MethodDescriptor.Marshaller<byte[]> BYTES = new MethodDescriptor.Marshaller<>() {
        @Override public InputStream stream(byte[] value) { return new ByteArrayInputStream(value); }

        @Override public byte[] parse(InputStream stream) {
            try {
                return stream.readAllBytes();
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    };

    static Thread daemon(Runnable task) {
        Thread thread = new Thread(task);
        thread.setDaemon(true);
        return thread;
    }

    static List<byte[]> requestsOf(Call call) {
        List<byte[]> requests = new ArrayList<>();
        for (JsonElement one : call.requests) {
            if (one.getAsJsonPrimitive().isNumber()) {
                byte[] request = new byte[one.getAsInt()];
                for (int place = 0; place < request.length; place++) request[place] = (byte) (place % 251);
                requests.add(request);
            } else {
                requests.add(Base64.getDecoder().decode(one.getAsString()));
            }
        }
        return requests;
    }

    static Metadata metadataOf(Call call) {
        Metadata metadata = new Metadata();
        for (List<String> pair : call.metadata) {
            String key = pair.get(0), value = pair.get(1);
            if (key.endsWith("-bin")) {
                metadata.put(Metadata.Key.of(key, Metadata.BINARY_BYTE_MARSHALLER), Base64.getDecoder().decode(value));
            } else {
                metadata.put(Metadata.Key.of(key, Metadata.ASCII_STRING_MARSHALLER), value);
            }
        }
        return metadata;
    }

    static ManagedChannel channelOf(Case of) throws Exception {
        NettyChannelBuilder builder = NettyChannelBuilder.forTarget(of.target)
            .disableRetry().maxInboundMessageSize(Integer.MAX_VALUE).maxInboundMetadataSize(1 << 20);
        if (of.keepalive_ms > 0) builder.keepAliveTime(of.keepalive_ms, TimeUnit.MILLISECONDS);
        if (of.tls == null) return builder.usePlaintext().build();
        var context = GrpcSslContexts.forClient().trustManager(new File(of.tls.get("ca")));
        if (of.tls.containsKey("key")) {
            context.keyManager(new File(of.tls.get("certificate")), new File(of.tls.get("key")));
        }
        return builder.sslContext(context.build()).build();
    }

    static CompletableFuture<One> callOnce(ManagedChannel channel, Call call, boolean gzip) {
        boolean clientStreams = !call.kind.equals("unary") && !call.kind.equals("server");
        boolean serverStreams = call.kind.equals("server") || call.kind.equals("bidi");
        MethodDescriptor.MethodType type = clientStreams
            ? (serverStreams ? MethodDescriptor.MethodType.BIDI_STREAMING : MethodDescriptor.MethodType.CLIENT_STREAMING)
            : (serverStreams ? MethodDescriptor.MethodType.SERVER_STREAMING : MethodDescriptor.MethodType.UNARY);
        MethodDescriptor<byte[], byte[]> method = MethodDescriptor.newBuilder(BYTES, BYTES)
            .setType(type).setFullMethodName(call.path.substring(1)).build();
        CallOptions options = CallOptions.DEFAULT;
        if (gzip) options = options.withCompression("gzip");
        if (call.timeout_ms > 0) options = options.withDeadlineAfter(call.timeout_ms, TimeUnit.MILLISECONDS);
        ClientCall<byte[], byte[]> running = channel.newCall(method, options);
        long began = System.nanoTime();
        One one = new One();
        CompletableFuture<One> ended = new CompletableFuture<>();
        Semaphore ready = new Semaphore(0);
        running.start(new ClientCall.Listener<>() {
            @Override public void onReady() { ready.release(); }

            @Override public void onMessage(byte[] data) {
                received(one, data);
                if (one.responses.size() == call.cancel_after) {
                    running.cancel("enough", null);
                } else if (call.read_pause_ms > 0) {
                    TIMERS.schedule(() -> running.request(1), call.read_pause_ms, TimeUnit.MILLISECONDS);
                } else {
                    running.request(1);
                }
            }

            @Override public void onClose(Status status, Metadata trailers) {
                one.seconds = (System.nanoTime() - began) / 1e9;
                one.status = status.getCode().value();
                one.message = status.getDescription() == null ? "" : status.getDescription();
                for (String key : trailers.keys()) addTrailers(one, trailers, key);
                ended.complete(one);
                ready.release(1 << 20);
            }
        }, metadataOf(call));
        running.request(serverStreams && call.read_pause_ms > 0 ? 1 : 2);
        if (call.cancel_after_ms > 0) {
            TIMERS.schedule(() -> running.cancel("late", null), call.cancel_after_ms, TimeUnit.MILLISECONDS);
        }
        daemon(() -> send(running, call, ended, ready)).start();
        return ended;
    }

    static void send(
        ClientCall<byte[], byte[]> running, Call call, CompletableFuture<One> ended, Semaphore ready) {
        try {
            int number = 0;
            for (byte[] request : requestsOf(call)) {
                if (number++ > 0) Thread.sleep(call.send_pause_ms);
                // gRPC holds the head of a call with one request back until that comes, and is not ready before.
                while (number > 1 && !running.isReady() && !ended.isDone()) ready.tryAcquire(100, TimeUnit.MILLISECONDS);
                if (ended.isDone()) return;
                running.sendMessage(request);
            }
            running.halfClose();
        } catch (InterruptedException | IllegalStateException error) {
            // The call is over.
        }
    }

    static void received(One one, byte[] data) {
        CRC32 checksum = new CRC32();
        checksum.update(data);
        String small = data.length <= SMALL_BYTES ? Base64.getEncoder().encodeToString(data) : "";
        one.responses.add(List.of(data.length, checksum.getValue(), small));
    }

    static void addTrailers(One one, Metadata trailers, String key) {
        if (key.endsWith("-bin")) {
            for (byte[] value : trailers.getAll(Metadata.Key.of(key, Metadata.BINARY_BYTE_MARSHALLER))) {
                one.trailing.add(List.of(key, Base64.getEncoder().encodeToString(value)));
            }
        } else {
            for (String value : trailers.getAll(Metadata.Key.of(key, Metadata.ASCII_STRING_MARSHALLER))) {
                one.trailing.add(List.of(key, value));
            }
        }
    }

    static CompletableFuture<List<One>> caller(ManagedChannel channel, Call call, boolean gzip) {
        CompletableFuture<List<One>> all = new CompletableFuture<>();
        List<One> calls = new ArrayList<>();
        TIMERS.schedule(
            () -> callAgain(channel, call, gzip, System.nanoTime() + call.for_ms * 1_000_000L, calls, all),
            call.start_ms, TimeUnit.MILLISECONDS);
        return all;
    }

    static void callAgain(
        ManagedChannel channel, Call call, boolean gzip, long ends, List<One> calls,
        CompletableFuture<List<One>> all) {
        callOnce(channel, call, gzip).thenAcceptAsync(one -> {
            calls.add(one);
            if (System.nanoTime() < ends) callAgain(channel, call, gzip, ends, calls, all);
            else all.complete(calls);
        }, TIMERS);
    }

    static Outcome outcomeOf(List<One> calls) {
        Outcome outcome = new Outcome();
        One worst = calls.get(0);
        Set<String> distinct = new HashSet<>();
        for (One one : calls) {
            if (worst.status == 0) worst = one;
            outcome.statuses.merge(String.valueOf(one.status), 1, Integer::sum);
            StringBuilder sums = new StringBuilder();
            for (List<Object> response : one.responses) sums.append(response.get(0)).append(response.get(1)).append(';');
            distinct.add(sums.toString());
            outcome.seconds = Math.max(outcome.seconds, one.seconds);
        }
        outcome.message = worst.message;
        outcome.trailing = worst.trailing;
        outcome.responses = calls.get(0).responses;
        outcome.distinct = distinct.size();
        return outcome;
    }

    static List<Outcome> run(Case of) throws Exception {
        List<ManagedChannel> channels = new ArrayList<>();
        for (int number = 0; number < of.connections; number++) channels.add(channelOf(of));
        List<List<CompletableFuture<List<One>>>> running = new ArrayList<>();
        for (Call call : of.calls) {
            List<CompletableFuture<List<One>>> callers = new ArrayList<>();
            for (int number = 0; number < call.repeat; number++) {
                callers.add(caller(channels.get(number % channels.size()), call, of.gzip));
            }
            running.add(callers);
        }
        List<Outcome> outcomes = new ArrayList<>();
        for (List<CompletableFuture<List<One>>> callers : running) {
            List<One> calls = new ArrayList<>();
            for (CompletableFuture<List<One>> caller : callers) calls.addAll(caller.get());
            outcomes.add(outcomeOf(calls));
        }
        for (ManagedChannel channel : channels) channel.shutdownNow();
        return outcomes;
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            System.out.println(GSON.toJson(Map.of("outcomes", run(GSON.fromJson(line, Case.class)))));
        }
        System.exit(0);
    }
}
