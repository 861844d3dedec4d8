"""The side of the process that owns the service."""
