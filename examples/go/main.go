// Classifies a text, with -embed returns its vector, or with -generate continues it: a client of a gateway, with TLS, an
// API key, retries and a deadline.
//
// Usage: classify -target HOST:PORT -model NAME TEXT
// An API key is in the environment: NEURONPIPE_API_KEY.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "neuronpipe.example/go/api/v1"
)

// gRPC repeats these calls by itself, after the time that the server asks for. round_robin uses all gateways behind a name.
const serviceConfig = `{
  "loadBalancingConfig": [{"round_robin": {}}],
  "methodConfig": [{
    "name": [{"service": "neuronpipe.api.v1.InferenceService"}],
    "retryPolicy": {
      "maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]
    }
  }]
}`

func connect(target, ca string) (*grpc.ClientConn, error) {
	security := withoutTLS()
	if ca != "" {
		authority, err := credentials.NewClientTLSFromFile(ca, "")
		if err != nil {
			return nil, err
		}
		security = grpc.WithTransportCredentials(authority)
	}
	large := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20))
	return newClient(target, security, large, grpc.WithDefaultServiceConfig(serviceConfig))
}

func classify(ctx context.Context, client pb.InferenceServiceClient, model, text string, topK uint32) error {
	input := &pb.TextClassificationInput{Text: text, TopK: topK}
	request := &pb.InferRequest{
		Model: model,
		Input: &pb.TaskInput{Task: &pb.TaskInput_TextClassification{TextClassification: input}},
	}
	response, err := client.Infer(ctx, request)
	if err != nil {
		return err
	}
	for _, label := range response.GetResult().GetTextClassification().GetLabels() {
		fmt.Printf("%s %.6f\n", label.Label, label.Score)
	}
	return nil
}

func embed(ctx context.Context, client pb.InferenceServiceClient, model, text string) error {
	input := &pb.SentenceEmbeddingInput{Text: text}
	request := &pb.InferRequest{
		Model: model,
		Input: &pb.TaskInput{Task: &pb.TaskInput_SentenceEmbedding{SentenceEmbedding: input}},
	}
	response, err := client.Infer(ctx, request)
	if err != nil {
		return err
	}
	fmt.Println(response.GetResult().GetSentenceEmbedding().GetEmbedding())
	return nil
}

func generate(ctx context.Context, client pb.InferenceServiceClient, model, prompt string) error {
	input := &pb.TextGenerationInput{Prompt: prompt}
	request := &pb.InferRequest{
		Model: model,
		Input: &pb.TaskInput{Task: &pb.TaskInput_TextGeneration{TextGeneration: input}},
	}
	stream, err := client.Generate(ctx, request)
	for err == nil {
		var event *pb.GenerateResponse
		if event, err = stream.Recv(); err == nil {
			fmt.Print(event.GetChunk().GetText())
		}
	}
	fmt.Println()
	if err == io.EOF {
		return nil
	}
	return err
}

func main() {
	target := flag.String("target", "127.0.0.1:50050", "the gateway's HOST:PORT")
	ca := flag.String("ca", "", "PEM file of the authority of the gateway's certificate; empty: no TLS")
	model := flag.String("model", "sentiment", "the model's name")
	topK := flag.Uint("top-k", 1, "how many labels to print")
	generates := flag.Bool("generate", false, "continue the text, with a model that generates")
	embeds := flag.Bool("embed", false, "print the text's vector, with a model that embeds")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: classify -target HOST:PORT -model NAME [-embed | -generate] TEXT")
		os.Exit(2)
	}

	connection, err := connect(*target, *ca)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := pb.NewInferenceServiceClient(connection)

	// The deadline covers all attempts. The server does not compute what cannot be ready in time.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if key := os.Getenv("NEURONPIPE_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	switch {
	case *generates:
		err = generate(ctx, client, *model, flag.Arg(0))
	case *embeds:
		err = embed(ctx, client, *model, flag.Arg(0))
	default:
		err = classify(ctx, client, *model, flag.Arg(0), uint32(*topK))
	}
	if err != nil {
		log.Fatal(explain(err))
	}
}

// The code says what to do: change the request, wait, or try again. The details name the reason and the field.
func explain(err error) string {
	found := status.Convert(err)
	text := fmt.Sprintf("%s: %s", found.Code(), found.Message())
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			text += " (" + detail.Reason + ")"
		case *errdetails.RetryInfo:
			text += fmt.Sprintf(", again in %s", detail.RetryDelay.AsDuration())
		}
	}
	return text
}
