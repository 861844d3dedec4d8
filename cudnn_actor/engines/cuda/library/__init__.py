"""The CUDA libraries: finding them, loading them, and translating their errors."""
