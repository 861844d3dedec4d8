"""Kernels of our own, compiled for the host and run there."""
