"""The prediction stage: runs sequences through models, in batches, on NeuronCores, GPUs or CPUs."""
