"""OpenVINO, Neuron and the CPUs of this machine, for the executor and for the compiler."""
