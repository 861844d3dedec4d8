"""Who runs an engine: the actor, its executor, what it defers, and how its plans come about."""
