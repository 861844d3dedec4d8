"""What proves the CUDA engine: the support matrix, a fuzzer, and whole services on a real GPU."""
