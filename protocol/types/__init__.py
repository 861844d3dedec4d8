"""The types that the other parts use: dtypes, tensors, buffers, parameters of convolutions, and checks."""
