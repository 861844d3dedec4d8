"""Running an engine: the actor, the runner, the executor, deferred requests and the building of plans."""
