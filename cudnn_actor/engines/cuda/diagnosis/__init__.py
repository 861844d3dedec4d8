"""Examines this machine's CUDA installation, and finds out why CUDA cannot be used."""
