"""cuDNN's graphs: the frontend's graph of an operation graph, kernel caches, and errata."""
