"""Plans that compute in float64 and round once: what the fast plans are compared with."""
