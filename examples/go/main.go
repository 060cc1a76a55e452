// Classifies a text: a client of a gateway made from protos/ alone.
//
// Usage: classify -target HOST:PORT -model NAME TEXT
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"time"

	pb "neuronpipe/api/v1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

func main() {
	target := flag.String("target", "127.0.0.1:50050", "the gateway's HOST:PORT")
	model := flag.String("model", "sentiment", "a model for text classification")
	topK := flag.Uint("top-k", 1, "how many labels to print")
	flag.Parse()

	connection, err := grpc.Dial(*target, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	text := &pb.TextClassificationInput{Text: flag.Arg(0), TopK: uint32(*topK)}
	request := &pb.InferRequest{
		Model: *model,
		Input: &pb.TaskInput{Task: &pb.TaskInput_TextClassification{TextClassification: text}},
	}
	response, err := pb.NewInferenceServiceClient(connection).Infer(ctx, request)
	if err != nil {
		// The code says what to do: change the request, wait, or try again.
		log.Fatalf("%s: %s", status.Code(err), status.Convert(err).Message())
	}
	for _, label := range response.GetResult().GetTextClassification().GetLabels() {
		fmt.Printf("%s %.6f\n", label.Label, label.Score)
	}
}
