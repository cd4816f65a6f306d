"""How far the distributions of an engine are from those of its file: SmolLM2-135M-Instruct in Q4_1,
Outrider and llama.cpp.

The reference is the file's own values, widened and multiplied in fp32 by transformers. Along
newspaper articles, every engine's distribution at every token is compared with the reference's:

    KL            sum p ln(p / q), p the reference's, in nats; mean over tokens, and its standard error over texts
    top-1         share of tokens at which both have the same likeliest token
    perplexity    exp of the mean of -ln q of the token that follows

    python benchmarks/fidelity.py                     a few minutes; needs ../shared, and llama.cpp from setup_peers.sh
    python benchmarks/fidelity.py --quick             two short texts, nothing stored
    python benchmarks/fidelity.py --render benchmarks/results/fidelity-DATE.json
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from questions import questions
from rich.table import Table
from torch import Tensor
from workers import interpreter
from workload import BENCHMARKS, SHARED, console, read_result, write_result

from outrider.build import Options, build

NAME = "fidelity"
MODEL = SHARED / "models" / "smollm2-135m-instruct"
REFERENCE = "the file's values in fp32"
CHUNK = 64  # tokens of a pass of ours
Texts = Sequence[list[int]]


@dataclass
class Distance:
    """Sums over the tokens of each text."""

    kl: list[float] = field(default_factory=list)
    same: list[int] = field(default_factory=list)
    surprise: list[float] = field(default_factory=list)

    def add(self, reference: Tensor, scores: Tensor, text: list[int]) -> None:
        """Scores (T, V) of one text; nothing follows the last ones."""
        p, q = (each.double().log_softmax(-1) for each in (reference, scores))
        self.kl.append(float((p.exp() * (p - q)).sum()))
        self.same.append(int((p.argmax(-1) == q.argmax(-1)).sum()))
        following = torch.tensor(text[1:])
        self.surprise.append(float(-q[:-1].gather(1, following[:, None]).sum()))


def articles(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """The first `length` tokens of newspaper articles."""
    texts = [text.removeprefix("Summarize: ") for text in questions("summarization", 80)]
    encoded = [
        list(tokenizer(text, add_special_tokens=False)["input_ids"])[:length] for text in texts
    ]
    return [ids for ids in encoded if len(ids) == length][:count]


def reference(file: Path, texts: Texts) -> Iterator[Tensor]:
    """Transformers in fp32, every weight widened."""
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    with torch.inference_mode():
        for text in texts:
            yield model(torch.tensor([text])).logits[0]


def outrider(file: Path, texts: Texts, threads: int, **options: Any) -> Iterator[Tensor]:
    """Our passes, CHUNK tokens at a time."""
    lm = build(Options(target=str(file), drafter="none", threads=threads, **options)).target.lm
    for text in texts:
        lm.kv.add_row()
        with torch.inference_mode():
            parts = []
            for start in range(0, len(text), CHUNK):
                piece = torch.tensor([text[start : start + CHUNK]])
                parts.append(
                    lm.forward(piece, columns=torch.arange(piece.shape[1])).logits[0].float()
                )
                lm.kv.advance(0, piece.shape[1])
            yield torch.cat(parts)
        lm.kv.swap_remove(0)


def llamacpp(file: Path, texts: Texts, threads: int) -> Iterator[Tensor]:
    """In an environment and a process of its own."""
    script = BENCHMARKS / "peers" / "llamacpp_logits.py"
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        tokens.write_text(json.dumps(list(texts)), encoding="utf-8")
        command = [interpreter("llamacpp"), script, file, tokens, folder, threads]
        subprocess.run(list(map(str, command)), check=True)
        for number in range(len(texts)):
            yield torch.from_numpy(np.load(Path(folder) / f"{number}.npy"))


def measure(file: Path, texts: Texts, threads: int) -> dict[str, Any]:
    """Every engine against the reference, one after the other."""
    wanted = list(reference(file, texts))
    engines: dict[str, Callable[[], Iterator[Tensor]]] = {
        REFERENCE: lambda: iter(wanted),
        "Outrider": lambda: outrider(file, texts, threads),
        "Outrider, --dtype float32": lambda: outrider(file, texts, threads, dtype="float32"),
    }
    if interpreter("llamacpp").exists():
        engines["llama.cpp"] = lambda: llamacpp(file, texts, threads)
    distances = {}
    for name, scores_of in engines.items():
        distance = Distance()
        for expected, scores, text in zip(wanted, scores_of(), texts, strict=True):
            distance.add(expected, scores, text)
        distances[name] = vars(distance)
    return distances


def show(result: dict[str, Any]) -> None:
    """One line an engine."""
    lengths = np.array(result["lengths"])
    title = f"{len(lengths)} texts of {lengths[0]} tokens, {result['file']}"
    table = Table("engine", "KL, nats", "top-1", "perplexity", title=title)
    for name, sums in result["engines"].items():
        means = np.array(sums["kl"]) / lengths
        error = means.std(ddof=1) / len(means) ** 0.5
        kl = f"{np.sum(sums['kl']) / lengths.sum():.4f} ± {error:.4f}"
        top = f"{np.sum(sums['same']) / lengths.sum():.2%}"
        table.add_row(
            name, kl, top, f"{np.exp(np.sum(sums['surprise']) / (lengths - 1).sum()):.3f}"
        )
    console().print(table)


def main(
    count: Annotated[int, typer.Option(help="texts")] = 8,
    length: Annotated[int, typer.Option(help="tokens of each")] = 512,
    threads: int = 2,
    quick: Annotated[bool, typer.Option(help="two texts of 64 tokens, nothing stored")] = False,
    render: Annotated[Path | None, typer.Option(help="show a stored result")] = None,
) -> None:
    """Measure, store and show."""
    if render is not None:
        show(read_result(render))
        return
    files = sorted(MODEL.glob("*.gguf"))
    if not files:
        console().print(f"{MODEL} holds no GGUF file: this needs ../shared")
        raise typer.Exit(1)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files[0].parent, gguf_file=files[0].name)
    texts = articles(tokenizer, 2 if quick else count, 64 if quick else length)
    result = {
        "file": files[0].name,
        "lengths": list(map(len, texts)),
        "engines": measure(files[0], texts, threads),
    }
    if not quick:
        console().print(str(write_result(NAME, result, threads)))
    show(result)


if __name__ == "__main__":
    typer.run(main)
