"""The way through CUDA: on a real card, or on a simulated one that runs each kernel on the CPU when its stream's turn comes."""
