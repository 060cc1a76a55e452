"""Compiles a Transformers model into a bundle. Needs torch and transformers; no service imports this package."""

from neuronpipe.compiler.buckets import NO_BUCKETS, BucketRequest
from neuronpipe.compiler.compile import COMPILERS, Compiled, CompileRequest, compile_bundle, compile_with_reference
from neuronpipe.compiler.conversion import NeuronxOptions
from neuronpipe.compiler.pipeline_parallel import PipelineOptions
from neuronpipe.compiler.rerankers import RerankerOptions

__all__ = [
    "COMPILERS",
    "NO_BUCKETS",
    "BucketRequest",
    "CompileRequest",
    "Compiled",
    "NeuronxOptions",
    "PipelineOptions",
    "RerankerOptions",
    "compile_bundle",
    "compile_with_reference",
]
