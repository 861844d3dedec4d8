"""A service from outside and as a whole: `spawn`, its handle, its options, where its actor lives."""
