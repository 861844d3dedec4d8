"""Stores of plans: in the memory of a process (`cache`), and in files that processes share (`store`)."""
