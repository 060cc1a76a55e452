"""The load generator: `neuronpipe load`, and run.run_load(request.LoadRequest(…)) for benchmarks.

It needs the same packages as the client.
"""
