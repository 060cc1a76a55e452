"""The messages of text-embeddings-inference's gRPC API. Generated from protos/."""
