"""The device: memory, transfers and fences."""
