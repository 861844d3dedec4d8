"""How CUDA runs operations."""
