"""Prompts that the real model answers before heads are trained on its answers: `python
benchmarks/head_prompts.py OUT.jsonl`.

Chat in MT-bench's eight styles (writing, roleplay, reasoning, math, coding, extraction, STEM,
humanities) from templates and word lists of our own, questions of general knowledge, texts to
summarise, and problems of the training sets of GSM8K and MATH. Nothing of Spec-Bench or of a test
set is in it, so those can be measured as held out.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from questions import lines
from workload import BENCHMARKS, SHARED

SHARES = {
    "writing": 14, "roleplay": 7, "reasoning": 7, "math": 4, "coding": 10, "extraction": 7, "stem": 12, "humanities": 12,
    "knowledge": 7, "summary": 5, "gsm8k": 10, "competition": 5,
}  # fmt: skip
WORDS = json.loads((BENCHMARKS / "head_words.json").read_text(encoding="utf-8"))
# {name} in them is one of the words of that name, {n} a number
TEMPLATES: dict[str, list[str]] = WORDS["templates"]
LONGEST_TEXT = 1600  # characters of a file or passage inside a prompt


def main(
    out: Annotated[Path, typer.Argument(help="JSON lines, one conversation each.")],
    count: Annotated[int, typer.Option(min=1)] = 5000,
    seed: int = 1,
) -> None:
    """Write prompts, no two alike."""
    with out.open("w", encoding="utf-8") as file:
        for number, (task, text) in enumerate(itertools.islice(prompts(seed), count)):
            entry = {
                "id": f"{task}-{number}",
                "task": task,
                "messages": [{"role": "user", "content": text}],
            }
            file.write(json.dumps(entry) + "\n")


def prompts(seed: int) -> Iterator[tuple[str, str]]:
    """(style, prompt) without end, always the same ones for a seed."""
    draw = random.Random(seed)
    makers = _makers(draw)
    seen: set[str] = set()
    styles = list(SHARES)
    weights = list(SHARES.values())
    while True:
        style = draw.choices(styles, weights)[0]
        text = makers[style]()
        if text not in seen:
            seen.add(text)
            yield style, text


def _makers(draw: random.Random) -> dict[str, Callable[[], str]]:
    passages = _passages()
    scenes = _scenes()
    gsm8k = _shuffled(draw, [item["question"] for item in lines("gsm8k/train.jsonl")])
    competition = _shuffled(draw, [item["problem"] for item in lines("math/problems.jsonl")])
    functions = _functions(draw)

    def filled(style: str) -> str:
        return _filled(draw, draw.choice(TEMPLATES[style]))

    def coding() -> str:
        if draw.random() < 0.35:
            return f"{draw.choice(TEMPLATES['about_code'])}\n\n```python\n{next(functions)}\n```"
        return filled("coding")

    def extraction() -> str:
        text = draw.choice(passages) if draw.random() < 0.6 else _made_text(draw)
        return f"{draw.choice(TEMPLATES['about_text'])}\n\n{text}"

    def summary() -> str:
        return f"{draw.choice(TEMPLATES['summarise'])}{draw.choice(scenes) if draw.random() < 0.3 else _made_text(draw)}"

    own: dict[str, Callable[[], str]] = {
        "coding": coding,
        "extraction": extraction,
        "summary": summary,
    }
    drawn: dict[str, Callable[[], str]] = {
        "gsm8k": lambda: next(gsm8k),
        "competition": lambda: next(competition),
    }
    return {style: partial(filled, style) for style in SHARES} | own | drawn


def _filled(draw: random.Random, template: str) -> str:
    """The template with words in its places."""

    def one(match: re.Match[str]) -> str:
        name = match[1]
        return str(draw.randint(2, 99)) if name == "n" else draw.choice(WORDS["words"][name])

    text = template
    while "{" in text:
        text = re.sub(r"\{(\w+)\}", one, text)
    return text[0].upper() + text[1:]


def _made_text(draw: random.Random) -> str:
    """A short report of sentences that hang together loosely."""
    return " ".join(
        _filled(draw, template) for template in draw.sample(TEMPLATES["report"], draw.randint(4, 8))
    )


def _shuffled(draw: random.Random, texts: list[str]) -> Iterator[str]:
    texts = [text for text in texts if len(text) <= LONGEST_TEXT]
    draw.shuffle(texts)
    return itertools.cycle(texts)


def _functions(draw: random.Random) -> Iterator[str]:
    """Python functions of the code set, without what stands around them."""
    found: list[str] = []
    for item in lines("code/python.jsonl"):
        for part in re.split(r"\n(?=def |class )", item["text"])[1:]:
            part = re.split(r"\n(?=\S)", part)[0].rstrip()
            if 120 <= len(part) <= LONGEST_TEXT:
                found.append(part)
    return _shuffled(draw, found)


def _passages() -> list[str]:
    """Word problems with their solutions, as prose."""
    return [
        f"{item['question']} {re.sub(r'<<.*?>>', '', item['answer'].split('####')[0])}".strip().replace(
            "\n", " "
        )
        for item in lines("gsm8k/train.jsonl")[:3000]
    ]


def _scenes() -> list[str]:
    """Pieces of Shakespeare, a few speeches each."""
    speeches = (
        (SHARED / "data" / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8").split("\n\n")
    )
    return ["\n\n".join(speeches[at : at + 5])[:LONGEST_TEXT] for at in range(0, len(speeches), 5)]


if __name__ == "__main__":
    typer.run(main)
