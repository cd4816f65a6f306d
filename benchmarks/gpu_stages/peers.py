"""Plain and assisted decoding beside transformers' `generate`, on the same weights, in the same
run, one prompt at a time.

All decode each prompt in turn, greedy, to exactly the same number of tokens; a rate is that of the
whole call, the prompt included. All prompts have one length, so that a static cache is compiled
once; compile time is reported apart. A peer that fails is recorded with its reason, and the others
go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from gpu_stages.gain import opened, widened_target
from outrider import SamplingParams
from outrider.configuration import Configuration
from outrider.demo import demo_paths
from tools.demo_models.problems import problems

if TYPE_CHECKING:
    from gpu_stages.context import Context

MINUTES = 1.75
# our plain decoding over transformers' plain `generate`
EAGER_FLOOR = 1.5
COMPILED_FLOOR = 1.0
OURS = "outrider plain"
OURS_DRAFTED = "outrider draft-model"
EAGER = "transformers eager"
COMPILED = "transformers compiled"
DRAFTED = 5
MAX_ROUNDS = 6
COMPILING_S = 40.0  # that must be left before compiling begins: nothing can interrupt it
LEFT_OUT = "left out"  # begins the reason of what was not tried

Decode = Callable[[list[int]], list[int]]  # prompt -> new tokens


@dataclass
class Race:
    """Decoders that take turns on the same prompts, and why others cannot."""

    context: Context
    prompts: list[list[int]]
    failures: dict[str, str]

    def enter(self, decoders: dict[str, Decode], needed_s: float = 0.0) -> dict[str, float]:
        """Run each on the first prompt three times, unmeasured; seconds of the first call. Decoders
        that fail are noted and taken out, and those for which fewer than `needed_s` seconds are
        left."""
        first: dict[str, float] = {}
        for name, decode in list(decoders.items()):
            if (left := self.context.left_s()) < needed_s:
                self.failures[name] = f"{LEFT_OUT}: {max(left, 0):.0f} s were left"
                del decoders[name]
                continue
            try:
                start = time.perf_counter()
                decode(self.prompts[0])
                first[name] = time.perf_counter() - start
                for _ in range(0 if self.context.tiny else 2):
                    decode(self.prompts[0])
            except Exception as error:  # noqa: BLE001 - whatever a peer raises is its own, and recorded
                self.failures[name] = f"{type(error).__name__}: {error}"[:400]
                self.context.say(f"{name} failed: {self.failures[name]}")
                del decoders[name]
        return first

    def run(self, decoders: dict[str, Decode], until: float) -> dict[str, Any]:
        """Rounds over all prompts while more than `until` seconds are left to the stage, at least
        one."""
        seconds: dict[str, list[float]] = {name: [] for name in decoders}
        texts: dict[str, list[list[int]]] = {name: [] for name in decoders}
        names = list(decoders)
        rounds = 0
        longest = 0.0
        while rounds == 0 or (
            rounds < MAX_ROUNDS
            and not self.context.tiny
            and self.context.left_s() - longest > until
        ):
            before = self.context.left_s()
            for index, prompt in enumerate(self.prompts):
                turn = (index + rounds) % len(names)
                for name in [*names[turn:], *names[:turn]]:
                    start = time.perf_counter()
                    found = decoders[name](prompt)
                    seconds[name].append(time.perf_counter() - start)
                    texts[name].append(found)
            rounds = rounds + 1
            longest = max(longest, before - self.context.left_s())
        return {
            name: {
                "tokens_per_s": sum(map(len, texts[name])) / sum(seconds[name]),
                "rounds": rounds,
                "compared": len(texts[name]),
                "identical": sum(
                    a == b for a, b in zip(texts[name], texts.get(OURS, texts[name]), strict=True)
                ),
            }
            for name in names
        }


def run(context: Context) -> dict[str, Any]:
    """Ours and eager ones first; then, where time is left, the compiled ones beside our plain
    decoding."""
    target = widened_target(context)
    try:
        return _run(context, target)
    finally:
        torch.compiler.reset()
        context.release()


def _run(context: Context, target: Path) -> dict[str, Any]:
    prompts = prompts_of_one_length(target, 2 if context.tiny else 4)
    max_tokens = 16 if context.tiny else 64
    race = Race(context, prompts, {})
    ours, runtime, notes = our_decoders(context, target, max_tokens)
    result: dict[str, Any] = {
        "judged": context.on_cuda,
        "failures": race.failures,
        "max_tokens": max_tokens,
        "runtime": runtime,
        "notes": notes,
    }
    model, draft = (hf_model(folder, context.device) for folder in (target, demo_paths().draft))
    eager = {**ours, **hf_decoders(EAGER, model, draft, max_tokens)}
    race.enter(eager)
    result["eager"] = race.run(eager, until=context.left_s() * 0.7)
    context.keep(result)
    context.say(
        ", ".join(
            f"{name} {one['tokens_per_s']:.1f} tokens/s" for name, one in result["eager"].items()
        )
    )
    if not context.on_cuda:
        race.failures[COMPILED] = f"{LEFT_OUT}: generate compiles static caches on a device"
        return result
    compiled = hf_decoders(COMPILED, model, draft, max_tokens, cache_implementation="static")
    # transformers refuses to assist static caches, at once: no time is lost
    compiled = dict(reversed(compiled.items()))
    result["compile_s"] = race.enter(compiled, needed_s=COMPILING_S)
    if compiled:
        result["compiled"] = race.run({OURS: ours[OURS], **compiled}, until=0.0)
    return result


def table(result: dict[str, Any]) -> list[list[str]]:
    """Our plain decoding over each of transformers' ways; the two plain ones have floors."""
    floors = {EAGER: EAGER_FLOOR, COMPILED: COMPILED_FLOOR}
    rows = []
    for part in ("eager", "compiled"):
        found = result.get(part, {})
        for name, one in found.items():
            rate = (
                f"{one['tokens_per_s']:.1f} tokens/s, {one['identical']} of {one['compared']} texts"
            )
            if name not in floors or OURS not in found:
                rows.append([f"peers, {part}: {name}", rate, "", ""])
                continue
            ratio = found[OURS]["tokens_per_s"] / one["tokens_per_s"]
            verdict = "" if not result.get("judged") else "ok" if ratio >= floors[name] else "below"
            rows.append(
                [
                    f"peers: outrider plain over {name}",
                    f"{ratio:.2f}x ({rate})",
                    f"{floors[name]:g}x",
                    verdict,
                ]
            )
    for name, why in result.get("failures", {}).items():
        rows.append(
            [f"peers: {name}", why if why.startswith(LEFT_OUT) else f"failed: {why}"[:90], "", ""]
        )
    return rows


def prompts_of_one_length(target: Path, count: int) -> list[list[int]]:
    """Held-out problems of the demo, all with the same number of tokens: the first length of which
    there are enough."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    by_length: dict[int, list[list[int]]] = {}
    for one in islice(problems(2024, held_out=True), 1000):
        ids = tokenizer(one.prompt)["input_ids"]
        mine = by_length.setdefault(len(ids), [])
        if ids not in mine:
            mine.append(ids)
        if len(mine) == count:
            return mine
    raise RuntimeError(f"no {count} prompts of one length")


def our_decoders(
    context: Context, target: Path, max_tokens: int
) -> tuple[dict[str, Decode], str, list[str]]:
    """Plain decoding and the draft model on models that are loaded once; their runtime; notes."""
    configurations = {OURS: Configuration(), OURS_DRAFTED: Configuration("draft-model", DRAFTED)}
    runner, runtime, notes = opened(context, target, configurations, rows=1)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    def decoder(configuration: Configuration) -> Decode:
        contender = runner.open(configuration)
        return lambda prompt: contender.run([prompt], params)[0].completion.token_ids

    return (
        {name: decoder(configuration) for name, configuration in configurations.items()},
        runtime,
        notes,
    )


def hf_model(folder: Path, device: torch.device) -> Any:
    """A model as transformers' users load it, that goes on behind the end of the text."""
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        .to(device)
        .eval()
    )
    model.generation_config.eos_token_id = None
    return model


def hf_decoders(
    name: str, model: Any, draft: Any, max_tokens: int, **options: Any
) -> dict[str, Decode]:
    """Plain `generate`, assisted by the draft model with a constant length, and by prompt look-up."""
    assistant = draft.generation_config
    assistant.num_assistant_tokens = DRAFTED
    assistant.num_assistant_tokens_schedule = "constant"
    assistant.assistant_confidence_threshold = 0.0
    ways = {
        name: {},
        f"{name}, assistant_model": {"assistant_model": draft},
        f"{name}, prompt look-up": {"prompt_lookup_num_tokens": DRAFTED},
    }

    def decoder(way: dict[str, Any]) -> Decode:
        def decode(prompt: list[int]) -> list[int]:
            ids = torch.tensor([prompt], device=model.device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                **way,
                **options,
            )
            found: list[int] = out[0, len(prompt) :].tolist()
            return found

        return decode

    return {label: decoder(way) for label, way in ways.items()}
