"""The CPU engines."""
