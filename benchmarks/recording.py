"""What recording costs: the same prompts decoded with and without the lab's recorder, in turn, in
one process.

The recorder (`outrider/lab/runner.py`) observes every step; without it, both sides are the same
decoder on the same caches. Runs alternate (with, without, without, with, ...), each prompt is its
own pair, and only decoding counts: from the end of a text's first step to its end. Beside that, the
seconds inside of the recorder are counted directly. Floor: recording costs at most 3 % of decoding.

    python benchmarks/recording.py --pair shared --prompts 12 --repeats 10
"""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.table import Table
from workload import (
    RESULTS,
    OtherCpu,
    console,
    encode,
    model_name,
    model_pair,
    prompt_texts,
    spread,
    write_result,
)

from outrider.cli.options import RuntimeName

FLOOR = 0.03
CONFIGURATIONS = "draft-model k=5, ngram k=5, draft-model k=8 tree=2x2, none"


def decode_s(
    contender: Any, prompt: list[int], params: Any, *, recorded: bool, recorder: Any = None
) -> tuple[float, list[int]]:
    """Seconds from the end of the first step to the end of the text, and the text. `recorder`: in
    place of the contender's."""
    from outrider.llm import LLM

    decoder = contender.built.decoder
    contender.recorder.steps = {}
    decoder.observers = [recorder or contender.recorder] if recorded else []
    try:
        done = LLM.around(contender.built).generate([prompt], params)[0]
    finally:
        decoder.observers = [contender.recorder]
    return done.stats.decode_s, list(done.token_ids)


class Timed:
    """An observer of steps and the seconds spent in it."""

    def __init__(self, observer: Any) -> None:
        self.observer = observer
        self.seconds = 0.0

    def observe(self, facts: Any) -> None:
        began = time.perf_counter()
        self.observer.observe(facts)
        self.seconds += time.perf_counter() - began


def direct_share(contender: Any, prompts: list[list[int]], params: Any) -> float:
    """The same, seen from inside: seconds in the recorder alone / seconds of decoding. Hardly
    disturbed by other programs."""
    timed = Timed(contender.recorder)
    total = sum(
        decode_s(contender, prompt, params, recorded=True, recorder=timed)[0] for prompt in prompts
    )
    return timed.seconds / total


def measure(contender: Any, prompts: list[list[int]], params: Any, repeats: int) -> dict[str, Any]:
    """Every pair of runs; texts must be equal. The overhead is the median over prompts and repeats
    of with / without - 1."""
    pairs = []
    others = OtherCpu(psutil.Process())
    for prompt in prompts:
        # memory and caches are warm from here on
        decode_s(contender, prompt, params, recorded=True)
    for number, (repeat, prompt) in enumerate(itertools.product(range(repeats), prompts)):
        order = (True, False) if number % 2 == 0 else (False, True)
        found = {
            recorded: decode_s(contender, prompt, params, recorded=recorded) for recorded in order
        }
        if not contender.keeps_learning and found[True][1] != found[False][1]:
            raise SystemExit("the texts differ: recording changed what was emitted")
        pairs.append(
            {
                "prompt": number % len(prompts),
                "repeat": repeat,
                "with_s": found[True][0],
                "without_s": found[False][0],
                "tokens": len(found[True][1]),
            }
        )
    overheads = [pair["with_s"] / pair["without_s"] - 1 for pair in pairs]
    return {
        "overhead": statistics.median(overheads),
        "overhead_of_totals": sum(pair["with_s"] for pair in pairs)
        / sum(pair["without_s"] for pair in pairs)
        - 1,
        "direct": direct_share(contender, prompts, params),
        "spread": spread(overheads),
        "other_cpu": others.share(),
        "pairs": pairs,
    }


def main(
    pair: Annotated[
        str, typer.Option(help="'shared', 'demo', or a folder with target and draft.")
    ] = "shared",
    configurations: Annotated[str, typer.Option(help="With commas between.")] = CONFIGURATIONS,
    prompts: Annotated[int, typer.Option(min=1)] = 12,
    repeats: Annotated[int, typer.Option(min=1)] = 10,
    max_tokens: Annotated[int, typer.Option(min=8)] = 160,
    runtime: Annotated[RuntimeName, typer.Option(help="Outrider's --runtime.")] = "auto",
    threads: Annotated[int, typer.Option(min=1)] = 2,
    folder: Annotated[Path, typer.Option(help="Where the result goes.")] = RESULTS,
) -> None:
    """Measure, print a table, write the pairs."""
    from outrider.build import Options
    from outrider.configuration import parse_configurations
    from outrider.lab.runner import Runner
    from outrider.sampling.params import SamplingParams

    target, draft = model_pair(pair)
    wanted = parse_configurations([configurations])
    needs_draft = any(one.parts().requirements.draft for one in wanted)
    options = Options(
        str(target), draft=str(draft) if needs_draft else None, runtime=runtime, threads=threads
    )
    runner = Runner(options, wanted, console().print)
    asked = encode(prompt_texts(prompts), target)
    params = SamplingParams(max_tokens=max_tokens)
    found = {}
    headings = (
        "configuration",
        "overhead, median",
        "of the totals",
        "from inside",
        "lowest .. highest",
        "others' CPU",
    )
    table = Table(*headings, "within 3 %")
    for configuration in wanted:
        one = found[configuration.label] = measure(
            runner.open(configuration), asked, params, repeats
        )
        low = one["spread"]["low"]
        high = one["spread"]["high"]
        table.add_row(
            configuration.label,
            f"{one['overhead']:+.2%}",
            f"{one['overhead_of_totals']:+.2%}",
            f"{one['direct']:.2%}",
            f"{low:+.1%} .. {high:+.1%}",
            f"{one['other_cpu']:.0%}",
            "yes" if one["overhead"] <= FLOOR else "NO",
        )
    console().print(table)
    settings = {
        "prompts": prompts,
        "repeats": repeats,
        "max_tokens": max_tokens,
        "runtime": runtime,
        "floor": FLOOR,
    }
    content = {
        "target": model_name(target),
        "draft": model_name(draft),
        "settings": settings,
        "configurations": found,
    }
    console().print(f"written: {write_result('recording', content, threads, folder)}")


if __name__ == "__main__":
    typer.run(main)
