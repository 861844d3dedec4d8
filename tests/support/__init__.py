"""What cuDNN is claimed to run, held against cuDNN itself without a GPU: see `make test-support`."""
