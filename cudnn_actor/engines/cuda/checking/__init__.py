"""The self-check of a plan: its results on the device, compared with references."""
