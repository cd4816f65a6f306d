"""Measuring OpenAI-compatible servers (vLLM, SGLang, llama.cpp, ours) from outside: `measure_servers` is all there is to call.

What a client can see is measured (tokens per second, latencies, texts); what happened inside is read from the server's own
counters where it shows them, and left out where it does not: nothing is estimated.
"""

from outrider.extras import check_lab

check_lab("measuring servers")
