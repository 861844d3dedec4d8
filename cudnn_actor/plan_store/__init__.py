"""Storage of plans: the cache of one process, and files that several processes share."""
