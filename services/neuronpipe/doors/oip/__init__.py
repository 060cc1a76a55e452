"""The Open Inference Protocol v2: tensors in, tensors out. What gRPC and HTTP have in common is in service.py."""
