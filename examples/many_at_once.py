"""Answers several questions at the same time over one engine, and prints each as it ends.

python examples/many_at_once.py demo
"""

from __future__ import annotations

import asyncio
import sys

from outrider import AsyncLLM, Completion, SamplingParams

QUESTIONS = [
    "Question: Tom has 12 pens. He buys 5 more. How many pens does he have in the end?",
    "Question: A box holds 6 eggs. How many eggs are in 7 boxes?",
    "Question: Rosa reads 15 pages a day. How many pages does she read in 4 days?",
]


async def answer(llm: AsyncLLM, question: str) -> Completion | None:
    """The whole answer; leaving the loop early would end it."""
    async for chunk in llm.generate(question, SamplingParams(max_tokens=120)):
        if chunk.completion is not None:
            return chunk.completion
    return None


async def main(model: str) -> None:
    """Ask everything at once."""
    async with AsyncLLM(model) as llm:
        tasks = [answer(llm, question) for question in QUESTIONS]
        for ended in asyncio.as_completed(tasks):
            completion = await ended
            if completion is not None:
                print(f"{completion.prompt}{completion.text}\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "demo"))
