"""vLLM in a process of its own: does an exported head do there what it does here?
`benchmarks/head_in_vllm.py` asks."""
