"""A real model from the first token on: SmolLM2-135M-Instruct in Outrider, llama.cpp and OpenVINO
GenAI on two threads.

Three parts, each with all engines in one run, taking turns:

    start      seconds from a command to its first token, to a server that is ready, and of each engine to its first token
    plain      decoding without drafts from the same file in 4, 8 and 16 bits, after prompts of three lengths
    drafting   our drafters that need no training and the peers' look-ups, on Spec-Bench, MT-bench and GSM8K

Greedy, batch 1, chat template applied, end of text ignored: exactly `max_tokens` tokens, all
engines reading the same token ids. Speeds count from the first token on. Drafters that learn begin
anew with each category and meet its prompts in order, once.

    python benchmarks/real_model.py                    all of it; peers that setup_peers.sh has not installed are left out
    python benchmarks/real_model.py --quick            one prompt of each kind, few tokens, nothing stored
    python benchmarks/real_model.py --render benchmarks/results/real-model-DATE.json
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any

import typer
from peers import Field
from real_formats import bf16_folder, converted
from real_prompts import CATEGORIES, SHORT, Prompts
from real_report import show
from real_start import measure_starts
from rich.console import Console
from workers import Worker, WorkerError, interpreter
from workload import PEERS, RESULTS, SHARED, console, read_result, write_result

NAME = "real-model"
MODEL = SHARED / "models" / "smollm2-135m-instruct"
MAX_MODEL_LEN = 2304
WAKING_TOKENS = 8  # generated before every measured run: a worker that waited has lost its caches
IR_FORMATS = {"Q4_1": "int4", "Q8_0": "int8", "BF16": "fp16"}  # OpenVINO's weights of as many bits
FREE = ("ngram k=5", "suffix k=8", "suffix k=auto:8", "composite parts=suffix+ngram k=8")
QUANTISED = (
    "quantised bits=4 k=5",
    "quantised bits=4 k=auto:8",
    "composite parts=quantised+suffix k=8",
)
PLAIN = {"outrider": "none", "llamacpp": "plain", "openvino": "plain"}
LOOKUPS = {"llamacpp": ("lookup k=10 ngram=2",), "openvino": ("lookup k=5 ngram=3",)}


@dataclass(frozen=True)
class Engine:
    """An engine with the weights it has loaded."""

    peer: str
    weights: str
    k: int = 0  # `Worker` hands it on: no draft model

    @property
    def name(self) -> str:
        return f"{self.peer} {self.weights}"


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    weights: tuple[str, ...]
    drafting_weights: tuple[str, ...]
    contexts: tuple[int, ...]  # tokens of a prompt; 0: a short question
    categories: tuple[str, ...]
    draftings: tuple[str, ...]
    prompts: int
    rounds: int
    starts: int
    max_tokens: int
    threads: int
    runtime: str

    def ours(self, weights: str) -> tuple[str, ...]:
        """A draft in the target's own four bits would be the target itself."""
        return tuple(one for one in self.draftings if "quantised" not in one or weights == "BF16")


def main(
    model: Annotated[
        Path, typer.Option(help="A GGUF file, or a folder with one.", show_default="../shared's")
    ] = MODEL,
    weights: Annotated[
        str, typer.Option(help="Formats for plain decoding, comma-separated.")
    ] = "Q4_1,Q8_0,BF16",
    drafting_weights: Annotated[str, typer.Option(help="Formats for the drafters.")] = "Q4_1,BF16",
    peers: Annotated[
        str, typer.Option(help="Engines beside ours, comma-separated.")
    ] = "llamacpp,openvino",
    categories: Annotated[str, typer.Option(help="Of prompts, comma-separated.")] = ",".join(
        CATEGORIES
    ),
    draftings: Annotated[str, typer.Option(help="Ours, in the lab's words.")] = ",".join(
        (*FREE, *QUANTISED)
    ),
    contexts: Annotated[
        str, typer.Option(help="Prompt lengths for plain decoding; 0: a short question.")
    ] = "0,800,2000",
    prompts: Annotated[int, typer.Option(min=1, help="Of each category.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Of plain decoding at each length.")] = 5,
    starts: Annotated[
        int, typer.Option(min=0, help="Of every command; 0 leaves that part out.")
    ] = 3,
    max_tokens: Annotated[int, typer.Option(min=2)] = 96,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    runtime: Annotated[str, typer.Option(help="Outrider's --runtime.")] = "auto",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="One prompt of each kind, 32 tokens, the file's weights only."
        ),
    ] = False,
    render: Annotated[
        Path | None, typer.Option(help="Print a stored result again.", dir_okay=False)
    ] = None,
    name: Annotated[str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")] = NAME,
) -> None:
    """Measure a real model beside its peers and compare with the floors."""
    out = console()
    if render:
        show(out, read_result(render))
        return
    source = gguf_file(model)
    if source is None:
        out.print(f"skipped: no GGUF file at {model}; name one with --model")
        return
    plan = Plan(
        listed(weights),
        listed(drafting_weights),
        tuple(int(n) for n in listed(contexts)),
        listed(categories),
        listed(draftings),
        prompts,
        rounds,
        starts,
        max_tokens,
        threads,
        runtime,
    )
    if quick:
        one = ("Q4_1",)
        few = min(starts, 1)
        plan = replace(
            plan, weights=one, drafting_weights=one, prompts=1, rounds=1, starts=few, max_tokens=32
        )
    content = measure(source, plan, present(listed(peers), out), out)
    if not quick:
        path = write_result(name, content, threads)
        for older in RESULTS.glob(f"{name}-[0-9]*.json*"):
            if older.name.removesuffix(".gz") != path.name.removesuffix(".gz"):
                older.unlink()
        out.print(f"written to benchmarks/results/{path.name}")
    show(out, content)
    sys.exit(1 if content["failures"] else 0)


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def gguf_file(model: Path) -> Path | None:
    """The model file: `model` itself, or the only GGUF file in that folder."""
    found = [model] if model.is_file() else sorted(model.glob("*.gguf"))
    return found[0].resolve() if len(found) == 1 else None


def present(peers: Sequence[str], out: Console) -> list[str]:
    """Peers that have an environment; a line names each of the others."""
    for peer in peers:
        if not interpreter(peer).exists():
            out.print(f"{peer}: not installed, left out (benchmarks/setup_peers.sh {peer})")
    return [peer for peer in peers if interpreter(peer).exists()]


def measure(source: Path, plan: Plan, peers: Sequence[str], out: Console) -> dict[str, Any]:
    """All three parts, one format of weights after another."""
    race = Race(source, plan, peers, out)
    began = time.perf_counter()
    content: dict[str, Any] = {"model": source.name, "plan": asdict(plan)}
    content |= {part: {} for part in ("engines", "start", "plain", "drafting")}
    if plan.starts:
        content["start"] = measure_starts(source, plan.starts, plan.runtime, plan.threads, out)
    for form in dict.fromkeys((*plan.weights, *plan.drafting_weights)):
        with race.engines(form) as workers:
            content["engines"] |= {worker.configuration.name: worker.about for worker in workers}
            if form in plan.weights:
                content["plain"][form] = race.plain(workers, form)
            if form in plan.drafting_weights:
                content["drafting"][form] = race.drafting(workers, form)
    return {
        **content,
        "failures": race.field.failures,
        "minutes": round((time.perf_counter() - began) / 60, 1),
    }


class Race:
    """All engines with the same weights, loaded at once and asked in turn."""

    def __init__(self, source: Path, plan: Plan, peers: Sequence[str], out: Console) -> None:
        self.source = source
        self.plan = plan
        self.out = out
        self.field = Field()
        self._peers = ("outrider", *peers)
        self._folder = bf16_folder(source)
        self._prompts = Prompts(self._folder)

    @contextmanager
    def engines(self, form: str) -> Iterator[list[Worker]]:
        """Loaded workers of one format; those that fail to load are noted and left out."""
        self.field.workers = []
        PEERS.mkdir(exist_ok=True)
        for peer in self._peers:
            engine = Engine(peer, form)
            try:
                with (PEERS / f"real-{peer}.worker.log").open("w") as log:
                    self.field.workers.append(Worker(engine, self._load(engine), log))  # type: ignore[arg-type]
                self.out.print(f"{engine.name}: loaded")
            except WorkerError as error:
                self.field.failures[engine.name] = str(error)
                self.out.print(f"{engine.name}: FAILED to load: {error}", style="red")
        try:
            yield list(self.field.workers)
        finally:
            for worker in self.field.workers:
                worker.close()

    def _load(self, engine: Engine) -> dict[str, Any]:
        plan = self.plan
        folder = str(self._folder)
        shared = {
            "draft": None,
            "threads": plan.threads,
            "max_model_len": MAX_MODEL_LEN,
            "cache": str(PEERS / "models"),
        }
        if engine.peer == "openvino":
            return {**shared, "target": folder, "format": IR_FORMATS[engine.weights]}
        file = str(converted(self.source, engine.weights))
        if engine.peer == "llamacpp":
            return {**shared, "target": file}
        target = folder if engine.weights == "BF16" else file
        drafting = {
            "draftings": plan.ours(engine.weights),
            "runtime": plan.runtime,
            "dtype": "auto",
        }
        return {**shared, "target": target, **drafting}

    def plain(
        self, workers: Sequence[Worker], form: str
    ) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """Context -> engine -> runs."""
        found: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for turn in range(self.plan.rounds):
            for context in self.plan.contexts:
                prompt = (
                    self._prompts.of_length(context, turn) if context else self._prompts.chat(SHORT)
                )
                entries = [(worker, PLAIN[worker.configuration.peer]) for worker in workers]
                for (worker, _), run in self._each(entries, prompt, turn):
                    engines = found.setdefault(str(context or "short"), {})
                    engines.setdefault(worker.configuration.peer, []).append({"round": turn, **run})
            self.out.print(f"{form} plain: round {turn + 1} of {self.plan.rounds}")
        return found

    def drafting(
        self, workers: Sequence[Worker], form: str
    ) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """Category -> "engine: drafting" -> runs."""
        found: dict[str, dict[str, list[dict[str, Any]]]] = {}
        entries = []
        for worker in workers:
            peer = worker.configuration.peer
            more = self.plan.ours(form) if peer == "outrider" else LOOKUPS[peer]
            entries += [(worker, drafting) for drafting in (PLAIN[peer], *more)]
        for category in self.plan.categories:
            for worker, drafting in list(entries):
                if self.field.attempt(worker, methodcaller("use", drafting, fresh=True)) is None:
                    entries = [entry for entry in entries if entry[0] is not worker]
            for number, prompt in enumerate(self._prompts.of_category(category, self.plan.prompts)):
                for (worker, drafting), run in self._each(entries, prompt, number):
                    runs = found.setdefault(category, {}).setdefault(
                        f"{worker.configuration.peer}: {drafting}", []
                    )
                    runs.append({"prompt": number, **run})
            self.out.print(f"{form} drafting: {category}")
        return found

    def _each(
        self, entries: Sequence[tuple[Worker, str]], prompt: list[int], turn: int
    ) -> Iterator[tuple[tuple[Worker, str], dict[str, Any]]]:
        """The prompt through every entry, forwards and backwards in turn; workers that failed are
        passed over."""
        for worker, drafting in entries[:: 1 if turn % 2 == 0 else -1]:
            if worker not in self.field.workers:
                continue
            run = self.field.attempt(worker, partial(self._run, drafting, prompt))
            if run is not None:
                yield (worker, drafting), run

    def _run(self, drafting: str, prompt: list[int], worker: Worker) -> dict[str, Any]:
        """One measured run of a woken worker, as it is stored."""
        worker.use(drafting)
        worker.run(self._prompts.chat("Hello!"), WAKING_TOKENS)
        run = worker.run(prompt, self.plan.max_tokens)
        if len(run["token_ids"]) != self.plan.max_tokens:
            raise WorkerError(f"{len(run['token_ids'])} tokens instead of {self.plan.max_tokens}")
        return stored(run, len(prompt))


def stored(run: dict[str, Any], num_prompt: int) -> dict[str, Any]:
    """Tokens per second after the first step's, seconds to those, and the text as a digest."""
    stats = run.get("stats", {})
    first = stats.get("first_tokens", 1)
    seconds = stats["decode_s"] if stats else run["seconds"] - run["ttft_s"]
    return {
        "tokens_per_s": round((len(run["token_ids"]) - first) / seconds, 2),
        "ttft_s": round(run["ttft_s"], 4),
        "num_prompt": num_prompt,
        "other_cpu": round(run["other_cpu"], 3),
        "text": hashlib.sha256(str(run["token_ids"]).encode()).hexdigest()[:8],
        **({"tau": round(stats["tau"], 3)} if stats else {}),
    }


if __name__ == "__main__":
    typer.run(main)
