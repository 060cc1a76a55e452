import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import com.google.rpc.Status;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import neuronpipe.api.v1.GenerateResponse;
import neuronpipe.api.v1.InferRequest;
import neuronpipe.api.v1.InferResponse;
import neuronpipe.api.v1.InferenceServiceGrpc;
import neuronpipe.api.v1.LabelScore;
import neuronpipe.api.v1.SentenceEmbeddingInput;
import neuronpipe.api.v1.TaskInput;
import neuronpipe.api.v1.TextClassificationInput;
import neuronpipe.api.v1.TextGenerationInput;

/**
 * Classifies a text, with the number of labels 0 continues it, or with "embed" as the number returns its vector: a client
 * of a gateway, with TLS, an API key, retries and a deadline. Usage: Classify HOST:PORT MODEL LABELS TEXT. In the
 * environment: NEURONPIPE_API_KEY, and in CA the PEM file of the authority of the gateway's certificate.
 */
public final class Classify {
    // gRPC repeats these calls by itself, after the time that the server asks for.
    private static final Map<String, ?> SERVICE_CONFIG = Map.of("methodConfig", List.of(Map.of(
            "name", List.of(Map.of("service", "neuronpipe.api.v1.InferenceService")),
            "retryPolicy", Map.of(
                    "maxAttempts", 4.0, "initialBackoff", "0.1s", "maxBackoff", "2s", "backoffMultiplier", 2.0,
                    "retryableStatusCodes", List.of("UNAVAILABLE", "RESOURCE_EXHAUSTED")))));

    public static void main(String[] arguments) throws Exception {
        if (arguments.length != 4) {
            System.err.println("usage: Classify HOST:PORT MODEL LABELS TEXT");
            System.exit(2);
        }
        String ca = System.getenv("CA");
        ChannelCredentials credentials = ca == null
                ? InsecureChannelCredentials.create()
                : TlsChannelCredentials.newBuilder().trustManager(new File(ca)).build();
        ManagedChannel channel = Grpc.newChannelBuilder(arguments[0], credentials)
                .defaultServiceConfig(SERVICE_CONFIG)
                .enableRetry()
                .defaultLoadBalancingPolicy("round_robin")
                .maxInboundMessageSize(64 << 20)
                .build();
        Metadata headers = new Metadata();
        String key = System.getenv("NEURONPIPE_API_KEY");
        if (key != null) {
            headers.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + key);
        }
        // The deadline covers all attempts. The server does not compute what cannot be ready in time.
        InferenceServiceGrpc.InferenceServiceBlockingStub client = InferenceServiceGrpc.newBlockingStub(channel)
                .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers))
                .withDeadlineAfter(10, TimeUnit.SECONDS);
        try {
            switch (arguments[2]) {
                case "embed":
                    embed(client, arguments[1], arguments[3]);
                    break;
                case "0":
                    generate(client, arguments[1], arguments[3]);
                    break;
                default:
                    classify(client, arguments[1], arguments[3], Integer.parseInt(arguments[2]));
            }
        } catch (StatusRuntimeException error) {
            System.err.println(explain(error));
            System.exit(1);
        } finally {
            channel.shutdown().awaitTermination(5, TimeUnit.SECONDS);
        }
    }

    private static void classify(
            InferenceServiceGrpc.InferenceServiceBlockingStub client, String model, String text, int labels) {
        TextClassificationInput input = TextClassificationInput.newBuilder().setText(text).setTopK(labels).build();
        InferRequest request = InferRequest.newBuilder()
                .setModel(model)
                .setInput(TaskInput.newBuilder().setTextClassification(input))
                .build();
        InferResponse response = client.infer(request);
        for (LabelScore label : response.getResult().getTextClassification().getLabelsList()) {
            System.out.printf(Locale.ROOT, "%s %.6f%n", label.getLabel(), label.getScore());
        }
    }

    private static void embed(
            InferenceServiceGrpc.InferenceServiceBlockingStub client, String model, String text) {
        SentenceEmbeddingInput input = SentenceEmbeddingInput.newBuilder().setText(text).build();
        InferRequest request = InferRequest.newBuilder()
                .setModel(model)
                .setInput(TaskInput.newBuilder().setSentenceEmbedding(input))
                .build();
        InferResponse response = client.infer(request);
        System.out.println(response.getResult().getSentenceEmbedding().getEmbeddingList());
    }

    private static void generate(
            InferenceServiceGrpc.InferenceServiceBlockingStub client, String model, String prompt) {
        TextGenerationInput input = TextGenerationInput.newBuilder().setPrompt(prompt).build();
        InferRequest request = InferRequest.newBuilder()
                .setModel(model)
                .setInput(TaskInput.newBuilder().setTextGeneration(input))
                .build();
        Iterable<GenerateResponse> events = () -> client.generate(request);
        for (GenerateResponse event : events) {
            System.out.print(event.getChunk().getText());
        }
        System.out.println();
    }

    /** The code says what to do: change the request, wait, or try again. The details name the reason and the field. */
    private static String explain(StatusRuntimeException error) throws InvalidProtocolBufferException {
        StringBuilder text = new StringBuilder()
                .append(error.getStatus().getCode()).append(": ").append(error.getStatus().getDescription());
        Status status = StatusProto.fromThrowable(error);
        for (Any detail : status.getDetailsList()) {
            if (detail.is(ErrorInfo.class)) {
                text.append(" (").append(detail.unpack(ErrorInfo.class).getReason()).append(")");
            } else if (detail.is(RetryInfo.class)) {
                Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
                text.append(String.format(Locale.ROOT, ", again in %.3f s", delay.getSeconds() + delay.getNanos() / 1e9));
            } else if (detail.is(BadRequest.class)) {
                text.append(", field ").append(detail.unpack(BadRequest.class).getFieldViolations(0).getField());
            }
        }
        return text.toString();
    }
}
