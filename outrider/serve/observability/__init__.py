"""Observability: metrics, traces, logs, recorded traffic and the self-test."""
