"""Messages and replies, and how a message becomes a graph."""
