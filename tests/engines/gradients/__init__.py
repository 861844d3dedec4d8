"""Gradients of operations and graphs, against finite differences and PyTorch."""
