"""Faces that publish the metrics of `gpu.metrics()`. Each needs an extra, and is imported by itself."""
