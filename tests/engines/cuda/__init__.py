"""The CUDA engine, as far as it shows without a GPU."""
