"""From a graph to its plan: cut into pieces, fused, compiled, checked and tuned."""
