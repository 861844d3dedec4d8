"""Faces that publish what `gpu.metrics()` says. Each needs an extra, and is imported by itself."""
