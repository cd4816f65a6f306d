"""What a server tells its operators: metrics, traces, logs, recorded traffic and the self-test."""
