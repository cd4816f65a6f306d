"""Whole tunings on simulated machines, to measure the quality of advice (`benchmarks/tune.py
--rehearse`)."""
