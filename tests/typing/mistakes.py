"""A client's mistakes: mypy must find one on each line that says so, and no other. Read by mypy,
never run."""

from __future__ import annotations

import outrider
from outrider import LLM, LMM, AsyncLLM, SamplingParams, StructuredOutputsParams  # attr-defined

SamplingParams(temprature=1)  # call-arg
SamplingParams(temperature="hot")  # arg-type
SamplingParams(0.7)  # call-arg
StructuredOutputsParams(jsn="{}")  # call-arg
LLM("demo", speculative_model="x")  # call-arg
LLM("demo", max_num_seqs="8")  # arg-type
llm = LLM(model=3)  # arg-type
llm.generat("Why?")  # attr-defined
llm.generate(3)  # arg-type
llm.generate("Why?", {"temperature": 1})  # arg-type
answer = llm.generate("Why?")[0]
print(answer.txt)  # attr-defined
print(answer.stats.tau + 1)  # operator
llm.generate(["Why?"], use_tqdm="yes")  # arg-type
llm.chat([{"role": "user"}], stream=True)[0]  # index
AsyncLLM("demo", gamma=3)  # call-arg
AsyncLLM("demo").chat([])  # attr-defined
print(LMM, outrider.Sampling)  # attr-defined
