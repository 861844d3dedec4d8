"""Ways to give a pool's requests to its members, simulated with recorded service times."""
