"""Kernels of the fast CPU engine against the definitions of their operations."""
