"""The side of a process that is attached to a service of another process."""
