"""Plans that are kept: in the memory of a process (`cache`), and in files that processes share (`store`)."""
