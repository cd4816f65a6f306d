"""Checkpoint folders whose weights are integers with scales: GPTQ, AWQ, compressed-tensors."""
