"""Drafts in long texts: tokens per target pass and the cost of a draft, by the length of the text.

Each line of the table is a drafter with its options. For the demo, whose models know texts of 1,024
tokens, the prompts are its own answers to held-out problems, one after another, and a new problem;
the target gets a sliding window of 256 tokens, so that it stays sensible in texts of any length. For
another model they are articles to be summarised. `window=1000000` sees all of a text, beyond what
the draft knows, too; without `window` nothing is drafted there.

    OMP_NUM_THREADS=1 python benchmarks/long_texts.py                                    the demo
    OMP_NUM_THREADS=1 python benchmarks/long_texts.py --target MODEL --draft MODEL \
        --drafters "draft-model window=1000000,draft-model window=1024" --lengths 1024,4096,8000

All settings take turns on each prompt. A draft's cost is the fastest of its calls at that length,
over the fastest at the shortest length of the same setting.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from questions import questions
from rich.table import Table
from workload import console, write_result

from outrider import LLM, SamplingParams
from outrider.demo import demo_paths
from tools.demo_models.problems import problems

SEED = 2031  # of held-out problems
DEMO = "demo"
DEMO_WINDOW = 256  # tokens that the demo's target sees
EAGLE3 = demo_paths().draft.parent / "heads" / "eagle3"
ALL = 1_000_000
DEMO_DRAFTERS = ",".join(
    f"{drafter} window={window}"
    for drafter in ("draft-model", "eagle3")
    for window in (ALL, "auto", DEMO_WINDOW)
)
BATCH = 8  # problems that the demo answers at once


def main(
    target: Annotated[str, typer.Option(help="A model, or demo.")] = DEMO,
    draft: Annotated[str | None, typer.Option(help="A draft model; the demo's by itself.")] = None,
    drafters: Annotated[str, typer.Option(help="Drafters with options, with commas.")] = "",
    lengths: Annotated[str, typer.Option(help="Tokens of prompts, with commas.")] = (
        "1024,2048,4096,8192,16384"
    ),
    prompts: Annotated[int, typer.Option(min=1, help="Of each length.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=8, help="Of an answer.")] = 96,
    k: Annotated[int, typer.Option(min=1, help="Draft tokens.")] = 5,
    name: Annotated[str, typer.Option(help="Of the result.")] = "long-texts",
) -> None:
    """Measure, store the result and print the table."""
    if target != DEMO and not drafters:
        raise typer.BadParameter("name the --drafters of this target")
    sizes = sorted(int(each) for each in lengths.split(","))
    named = [each.strip() for each in (drafters or DEMO_DRAFTERS).split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        big = str(long_target(Path(scratch) / "target")) if target == DEMO else target
        engines = {each: engine(big, target, draft, each, k) for each in named}
        texts = demo_texts(sizes, prompts) if target == DEMO else articles(big, sizes, prompts)
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        runs = measure(engines, texts, params, k)
    settings = {"k": k, "target": target, "draft": draft}
    rows = [list(run.values()) for run in runs]
    write_result(name, {"settings": settings, "columns": list(runs[0]), "rows": rows}, 1)
    console().print(table_of(runs, sizes, named))


def long_target(folder: Path) -> Path:
    """The demo's target as a model with a sliding window: the same weights under another name."""
    shutil.copytree(demo_paths().target, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    changes = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": DEMO_WINDOW,
        "max_position_embeddings": 32768,
    }
    path.write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder


def engine(target: str, called: str, draft: str | None, drafter: str, k: int) -> LLM:
    """The target with this drafter."""
    kind = drafter.split()[0]
    if draft is None and called == DEMO:
        draft = str(demo_paths().draft if kind == "draft-model" else EAGLE3)
    return LLM(target, draft=draft, drafter=drafter, num_draft_tokens=k, threads=1)


def demo_texts(sizes: list[int], count: int) -> Iterator[tuple[int, list[int]]]:
    """(length, token ids) of the demo's answers one after another, and a new problem after them."""
    llm = LLM(DEMO, threads=1, max_num_seqs=BATCH)
    start, end = 0, 1
    params = SamplingParams(temperature=0, max_tokens=160)
    stream = problems(SEED, held_out=True)
    answered: list[int] = []
    while len(answered) < max(sizes):
        asked = [f"Question: {each.question}\nAnswer:" for each in islice(stream, BATCH)]
        for output in llm.generate(asked, params, use_tqdm=False):
            answered += [*output.prompt_token_ids, *output.token_ids]
            answered += [end] if answered[-1] != end else []
    for _ in range(count):
        question = f"Question: {next(stream).question}\nAnswer:"
        problem = [start, *llm.tokenizer(question, add_special_tokens=False)["input_ids"]]
        for size in sizes:
            yield size, [*answered[-(size - len(problem)) :], *problem]


def articles(model: str, sizes: list[int], count: int) -> Iterator[tuple[int, list[int]]]:
    """(length, token ids) of requests to summarise newspaper articles."""
    llm = LLM(model, drafter="none", threads=1)
    for number in range(count):
        joined = "\n\n".join(questions("summarization", 80, number))
        words = llm.tokenizer(joined, add_special_tokens=False)["input_ids"]
        for size in sizes:
            cut = llm.tokenizer.decode(words[: size - 64])
            message = {"role": "user", "content": f"{cut}\n\nSummarise the articles above."}
            yield size, llm.chat_prompt([message])


def measure(
    engines: dict[str, LLM],
    texts: Iterator[tuple[int, list[int]]],
    params: SamplingParams,
    k: int,
) -> list[dict[str, Any]]:
    """One entry a prompt and setting: tokens, target passes, and the seconds of the fastest draft."""
    calls: list[float] = []
    for llm in engines.values():
        watch(llm, calls, k)
    runs: list[dict[str, Any]] = []
    expected: list[int] = []
    for number, (length, tokens) in enumerate(texts):
        for place, (name, llm) in enumerate(engines.items()):
            calls.clear()
            answer = llm.generate([tokens], params, use_tqdm=False)[0]
            if place == 0:
                expected = answer.token_ids
            runs.append(
                {
                    "number": number,
                    "length": length,
                    "drafter": name,
                    "tokens": answer.stats.emitted,
                    "passes": answer.stats.steps,
                    "drafted": answer.stats.drafted,
                    "draft_s": round(
                        min(calls[1:], default=0.0), 6
                    ),  # the first one reads the prompt
                    "same_text": answer.token_ids == expected,
                }
            )
    return runs


def watch(llm: LLM, calls: list[float], k: int) -> None:
    """Note the seconds of every draft of `k` tokens from now on."""
    drafter: Any = llm._decoder.drafter
    propose = drafter.propose

    def watching(rows: Any, gamma: list[int]) -> Any:
        start = time.perf_counter()
        draft = propose(rows, gamma)
        if max(gamma) == k:
            calls.append(time.perf_counter() - start)
        return draft

    drafter.propose = watching


def table_of(runs: list[dict[str, Any]], sizes: list[int], named: list[str]) -> Table:
    """tau, and the cost of a draft, by length."""
    table = Table("drafter", *(f"{size:,}" for size in sizes), title="tau, x draft's cost")
    for name in named:
        cells = []
        first = 0.0
        for size in sizes:
            some = [run for run in runs if (run["drafter"], run["length"]) == (name, size)]
            seconds = min((run["draft_s"] for run in some if run["drafted"]), default=0.0)
            first = first or seconds
            tau = sum(run["tokens"] for run in some) / sum(run["passes"] for run in some)
            cells.append(f"{tau:.2f}, {seconds / first:.2f}" if seconds else f"{tau:.2f}")
        table.add_row(name.replace(str(ALL), "all"), *cells)
    return table


if __name__ == "__main__":
    typer.run(main)
