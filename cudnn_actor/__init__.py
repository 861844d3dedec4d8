"""cudnn-actor."""
