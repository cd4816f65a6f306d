"""Measuring OpenAI-compatible servers (vLLM, SGLang, llama.cpp, ours) from outside: `measure_servers` is all there is to call.

    from outrider.lab.server.options import ServerEndpoint
    from outrider.lab.server.measure import measure_servers
    from outrider.lab.server.options import LoadOptions

    plain, speculative = ServerEndpoint.parse(URL), ServerEndpoint.parse(URL2)
    measured = measure_servers({"plain": plain, "speculative": speculative}, workload, LoadOptions())

What a client can see is measured (tokens per second, latencies, texts); what happened inside is read from the server's own
counters where it shows them, and left out where it does not: nothing is estimated.
"""
