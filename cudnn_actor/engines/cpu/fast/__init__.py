"""Plans that compute in float32, with BLAS, block by block."""
