import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
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
import neuronpipe.api.v1.TaskInput;
import neuronpipe.api.v1.TextClassificationInput;
import neuronpipe.api.v1.TextGenerationInput;

/**
 * Classifies a text, or with the number of labels 0 continues it: a client of a gateway, with TLS, an API key, retries
 * and a deadline. Usage: Classify HOST:PORT MODEL LABELS TEXT. In the environment: NEURONPIPE_API_KEY, and in CA the PEM
 * file of the authority of the gateway's certificate.
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
        int labels = Integer.parseInt(arguments[2]);
        try {
            if (labels > 0) {
                classify(client, arguments[1], arguments[3], labels);
            } else {
                generate(client, arguments[1], arguments[3]);
            }
        } catch (StatusRuntimeException error) {
            // The code says what to do: change the request, wait, or try again.
            System.err.printf("%s: %s%n", error.getStatus().getCode(), error.getStatus().getDescription());
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
}
