"""Processes of our own: which Python runs them, who forks them, and what ends them."""
