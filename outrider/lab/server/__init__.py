"""Measuring OpenAI-compatible servers (vLLM, SGLang, llama.cpp, ours) from outside, for
`outrider bench URL` and `certify URL`.

    client.py    one server: its address, the body of a request, and the stream that answers it
    counters.py  the server's own counters, read before and after
    logprobs.py  tokens and their log-probabilities, as servers write them into an answer
    measure.py   the prompts through one server, or through two in turn
"""

from outrider.extras import check_lab

check_lab("measuring servers")
