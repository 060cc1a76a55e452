"""The load generator: `neuronpipe load`, and for benchmarks run.run_load(request.LoadRequest(…)). Needs what the client needs."""
