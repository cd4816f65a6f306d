"""Programs on a CUDA device: linear layers by torch, everything between them in few kernels that
are written for the model."""
