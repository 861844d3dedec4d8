"""Self-checks, run on the host."""
