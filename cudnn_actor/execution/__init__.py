"""Running an engine: the runner, the executor, deferred requests and the building of plans."""
