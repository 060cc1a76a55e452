"""The messages of the Open Inference Protocol v2, package `inference`. Generated from protos/.

A process can contain one copy of them: a process that imports tritonclient.grpc cannot import these messages. So only a
gateway imports them.
"""
