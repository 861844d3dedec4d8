"""The two kinds of isolation: a service's actor runs on a thread, or in a worker process."""
