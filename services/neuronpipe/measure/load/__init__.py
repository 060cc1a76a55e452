"""The load generator: `neuronpipe load`, and run.run_load(request.LoadRequest(…)) for benchmarks.

The generator needs the same packages as the client.
"""
