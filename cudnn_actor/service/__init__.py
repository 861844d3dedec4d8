"""The service as a whole: `spawn`, the handle, the options, and where the actor runs."""
