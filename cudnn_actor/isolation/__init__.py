"""The two ways in which an actor runs: all that differs between them."""
