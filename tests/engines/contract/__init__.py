"""What every engine does: each of these runs on each engine that this machine has."""
