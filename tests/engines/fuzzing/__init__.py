"""The GPU's fuzzers and soak on the CPU engine: they pass, and they notice mistakes."""
