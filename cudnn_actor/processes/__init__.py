"""The package's own processes: which Python runs them, who forks them, and what ends them."""
