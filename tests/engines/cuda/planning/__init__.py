"""Where graphs are cut, and what becomes of the pieces."""
