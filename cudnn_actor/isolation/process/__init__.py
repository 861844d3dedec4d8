"""Process isolation: the engine runs in a worker process, which may die without harm to its parent."""
