"""OpenVINO, Neuron and the CPUs of this machine, for both the executor and the compiler."""
