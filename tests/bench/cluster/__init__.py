"""A simulation of a cluster: how rules of autoscaling do under the load of a day, of bursts and of a flash crowd.

Run: python -m tests.bench.cluster          writes figures and plots of docs/benchmarks (`make simulate-cluster`)
     python -m tests.bench.cluster --check  compares the model with real executors of this machine, without writing
"""
