"""Plans that are kept: the cache of one process, and files that several share."""
