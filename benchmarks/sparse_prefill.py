"""What speculative prefill saves and costs: time to first token, and agreement with the answers to
the whole prompts.

    OMP_NUM_THREADS=1 python benchmarks/sparse_prefill.py MODEL.gguf

Questions of Spec-Bench's `rag` after their own passages among those of other questions, 2,000 to
8,000 tokens in all. Every prompt is read whole and in each other way in turn. `agree` is the share
of the first 64 tokens of the answer to the whole prompt that are the sparse target's first choice,
too, given the answer so far; `equal` is how many tokens of its own answer are the same until the
first other one. `at random` keeps chunks by lot, as a control.
"""

from __future__ import annotations

from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from questions import questions

from outrider import LLM, SamplingParams
from outrider.prefill import SparsePrefill

LENGTHS = {2000: 5, 4000: 2, 8000: 1}  # tokens -> prompts
ANSWER = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
WAYS = {
    "early:8": "keep=0.2 draft=early:8",
    "early:8, keep=0.5": "keep=0.5 draft=early:8",
    "at random": "keep=0.2 draft=early:1",
}


def prompt_of(llm: Any, number: int, length: int) -> list[int]:
    """A question's own passages stand a sixth, a third, ... of the way into those of others."""
    items = [text.rsplit("\n", 1) for text in questions("rag", 80)]
    passages = [f"{passage}\n\n" for passage, _ in items]
    others = passages[number + 1 :] + passages[:number]
    question = f"Answer from the texts above: {items[number][1]}"
    tokens: list[int] = []
    for used in range(len(others), 0, -1):
        before = used * (number % 5 + 1) // 6
        texts = [*others[:before], passages[number], *others[before:used], question]
        tokens = llm.chat_prompt([{"role": "user", "content": "".join(texts)}])
        if len(tokens) <= length:
            break
    return tokens


def at_random(prefill: SparsePrefill) -> None:
    """Keep chunks by lot from now on."""
    draw = torch.Generator().manual_seed(0)
    prefill._scores = lambda lm, asking: torch.rand(lm.kv.lengths[0] + 32, generator=draw)  # type: ignore[method-assign]


@torch.inference_mode()
def agreement(llm: Any, prompt: list[int], answer: list[int]) -> float:
    """Share of these tokens that the target of `llm` would choose first, given those before."""
    built = llm._built
    lm = built.target.lm.twin()
    lm.kv.add_row()
    reading = built.prefill.reading(prompt)
    while not reading.advance(lm, 0):
        pass
    logits = lm.forward(torch.tensor([[prompt[-1], *answer[:-1]]])).logits
    return fmean((logits[0].argmax(-1) == torch.tensor(answer)).float().tolist())


def main(model: Annotated[str, typer.Argument(help="A GGUF file or a folder.")]) -> None:
    """Time to the first token, and agreement with the whole prompt's answers."""
    whole: Any = LLM(model, drafter="none", max_num_seqs=1)
    ways: dict[str, Any] = {
        name: LLM(model, drafter="none", prefill=prefill) for name, prefill in WAYS.items()
    }
    at_random(ways["at random"]._built.prefill)
    print("tokens | way | read | first token, s | times faster | agree | equal")
    for length, count in LENGTHS.items():
        rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
        plain_s: list[float] = []
        for number in range(count):
            prompt = prompt_of(whole, number, length)
            ids = {"prompt_token_ids": prompt}
            expected = whole.generate(ids, ANSWER, use_tqdm=False)[0]
            plain_s.append(expected.stats.ttft_s)
            for name, llm in ways.items():
                done = llm.generate(ids, ANSWER, use_tqdm=False)[0]
                pairs = zip(done.token_ids, expected.token_ids, strict=True)
                equal = next((at for at, (own, its) in enumerate(pairs) if own != its), 64)
                agree = agreement(llm, prompt, expected.token_ids)
                rows[name].append((done.prompt_share, done.stats.ttft_s, agree, equal))
        print(f"{length} | whole | 100% | {fmean(plain_s):.2f} | 1 | 100% | 64")
        for name, values in rows.items():
            share, seconds, agreed, equals = (fmean(column) for column in zip(*values, strict=True))
            times = fmean(plain_s) / seconds
            figures = f"{share:.0%} | {seconds:.2f} | {times:.2f} | {agreed:.0%} | {equals:.1f}"
            print(f"{length} | {name} | {figures}", flush=True)


if __name__ == "__main__":
    typer.run(main)
