"""A simulation of a cluster: how rules of autoscaling do under the load of a day, of bursts and of a flash crowd.

Run: python -m tests.bench.cluster          writes docs/autoscaling.md's figures and plots (`make simulate-cluster`)
     python -m tests.bench.cluster --check  compares the model with real executors of this machine, without writing
"""
