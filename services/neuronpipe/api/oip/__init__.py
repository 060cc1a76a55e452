"""The messages of the Open Inference Protocol v2, package `inference`. Generated from protos/.

A process can have one copy of them: one that imports tritonclient.grpc cannot import these, so only a gateway does.
"""
