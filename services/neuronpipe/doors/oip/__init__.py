"""The Open Inference Protocol v2: tensors in, tensors out. gRPC and HTTP share the service in service.py."""
