"""The side of a worker process that the service's own process has."""
