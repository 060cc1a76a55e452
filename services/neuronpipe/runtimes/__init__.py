"""What this process knows of OpenVINO, Neuron and the CPUs, for the executor and the compiler alike."""
