"""The stages of `benchmarks/gpu.py`, a module each, in order of value: what is lost when time runs
out is what matters least."""

STAGES = ("right", "roof", "overhead", "gain", "peers", "training")
