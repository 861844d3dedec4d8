"""Benchmarks: scripts that print tables and write JSON. They assert nothing."""
