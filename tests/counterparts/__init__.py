"""The counterparts of cuDNN's functions: a table, and the page made from it."""
