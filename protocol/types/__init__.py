"""What the rest is made of: dtypes, tensors, buffers, settings of convolutions, errors and checks."""
