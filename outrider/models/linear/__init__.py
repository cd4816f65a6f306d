"""Linear layers on fast CPU kernels."""
