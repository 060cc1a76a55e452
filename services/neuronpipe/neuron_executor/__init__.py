"""The prediction stage: sequences to the model's outputs, in batches, on NeuronCores, a GPU or CPUs."""
