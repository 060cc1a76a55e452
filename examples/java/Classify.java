import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import java.util.Locale;
import java.util.concurrent.TimeUnit;
import neuronpipe.api.v1.Inference.InferRequest;
import neuronpipe.api.v1.Inference.InferResponse;
import neuronpipe.api.v1.InferenceServiceGrpc;
import neuronpipe.api.v1.Tasks.LabelScore;
import neuronpipe.api.v1.Tasks.TaskInput;
import neuronpipe.api.v1.Tasks.TextClassificationInput;

/** Classifies a text: a client of a gateway made from protos/ alone. Usage: Classify HOST:PORT MODEL TOP_K TEXT */
public final class Classify {
    public static void main(String[] arguments) throws InterruptedException {
        ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
        try {
            TextClassificationInput text = TextClassificationInput.newBuilder()
                    .setText(arguments[3])
                    .setTopK(Integer.parseInt(arguments[2]))
                    .build();
            InferRequest request = InferRequest.newBuilder()
                    .setModel(arguments[1])
                    .setInput(TaskInput.newBuilder().setTextClassification(text))
                    .build();
            InferResponse response = InferenceServiceGrpc.newBlockingStub(channel)
                    .withDeadlineAfter(10, TimeUnit.SECONDS)
                    .infer(request);
            for (LabelScore label : response.getResult().getTextClassification().getLabelsList()) {
                System.out.printf(Locale.ROOT, "%s %.6f%n", label.getLabel(), label.getScore());
            }
        } catch (StatusRuntimeException error) {
            // The code says what to do: change the request, wait, or try again.
            System.err.printf("%s: %s%n", error.getStatus().getCode(), error.getStatus().getDescription());
            System.exit(1);
        } finally {
            channel.shutdown().awaitTermination(5, TimeUnit.SECONDS);
        }
    }
}
