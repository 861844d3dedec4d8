"""The graph language: what users write, the graphs that it makes, and their pictures."""
