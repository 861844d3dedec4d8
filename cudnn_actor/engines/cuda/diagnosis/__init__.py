"""What this machine has, and what is wrong where CUDA cannot be used."""
