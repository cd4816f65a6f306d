"""Texts, bits and distributions of the embedded demo models on the device, in this process: no test
tools are needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_stages.context import Context
from outrider.build import Models, Needs, Options, assemble, choose, load_models
from outrider.drafters import DRAFTERS
from outrider.errors import CapabilityError
from outrider.lab.certify.sampled import Draws
from outrider.lab.certify.subject import Subject
from outrider.lab.journal import Journal
from outrider.llm import LLM
from outrider.models.graphs import GraphedPass
from outrider.models.probes.probe import probe_logits
from outrider.parts import Parts
from outrider.sampling.params import SamplingParams

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIRED: dict[str, dict[str, Any]] = {  # settings without which a drafter is not built
    "retrieval": {"corpus": str(REPOSITORY / "README.md")}, "composite": {"parts": "ngram,draft-model"},
}  # fmt: skip
WITHOUT_HEAD = ("eagle",)  # the demo target has none; the contract tests make one
TINY_DRAFTERS = ("none", "draft-model", "ngram", "eagle3")
PROMPTS = (
    "Question: A shop sells 3 pens for 2 dollars each. How much are they?\nAnswer:",
    "Question: Tom has 12 apples and gives 5 away. How many are left?\nAnswer:",
)
KINDS = {
    "greedy": SamplingParams(ignore_eos=True),
    "T = 1": SamplingParams(temperature=1.0, seed=7, ignore_eos=True),
}
TOKENS = 64
TINY_TOKENS = 12
SAMPLES = 2000
TINY_SAMPLES = 32


def demo(
    context: Context, device: Any, parts: list[Parts], runtime: str, dtype: str = "float32"
) -> Models:
    """The demo target, its draft where one of the parts wants it, once for all of them."""
    return load_models(options(device, runtime, "none", dtype), Needs.of_all(parts))


def options(device: Any, runtime: Any, drafter: str, dtype: str = "float32") -> Options:
    draft = "demo" if drafter == "universal" else None
    return Options(
        target="demo",
        drafter=drafter,
        draft=draft,
        drafter_options=REQUIRED.get(drafter, {}),
        dtype=dtype,
        device=str(device),
        runtime=runtime,
    )


def parts_of(names: tuple[str, ...], device: Any) -> dict[str, Parts]:
    return {name: choose(options(device, "eager", name))[1] for name in names}


def mode_of(context: Context) -> str:
    """Graphs on the device; on a CPU the eager reference."""
    return "graphs" if context.on_cuda else "eager"


def texts_of(context: Context, models: Models, parts: Parts, kind: str) -> list[list[int]]:
    """Token ids of the answers to both prompts, decoded together."""
    params = replace(KINDS[kind], max_tokens=TINY_TOKENS if context.tiny else TOKENS)
    with LLM.around(assemble(models, parts)) as llm:
        return [done.token_ids for done in llm.generate(list(PROMPTS), params)]


def texts(context: Context) -> dict[str, Any]:
    """Every drafter in fp32, greedy and drawn, against the same on the CPU, which for greedy text
    is plain decoding's."""
    broken = {} if context.tiny else DRAFTERS.broken()
    everyone = (name for name in DRAFTERS.names() if name not in (*WITHOUT_HEAD, *broken))
    names = TINY_DRAFTERS if context.tiny else tuple(everyone)
    parts = parts_of(names, context.device)
    here = demo(context, "cpu", list(parts.values()), "eager")
    there = demo(context, context.device, list(parts.values()), mode_of(context))
    plain = texts_of(context, here, parts["none"], "greedy")
    found: dict[str, Any] = {
        f"{name}, greedy": f"refused: {reason}" for name, reason in broken.items()
    }
    for name, mine in parts.items():
        context.check_time()
        try:
            for kind in KINDS:
                expected = plain if kind == "greedy" else texts_of(context, here, mine, kind)
                found[f"{name}, {kind}"] = parted(expected, texts_of(context, there, mine, kind))
        except CapabilityError as error:
            found[f"{name}, greedy"] = f"refused: {str(error).splitlines()[0]}"
        context.keep(
            {"texts": {"right": None, "told": f"{len(found)} were compared", "each": found}}
        )
    different = [name for name, result in found.items() if result.startswith("differs")]
    refused = [name.split(",")[0] for name, result in found.items() if result.startswith("refused")]
    compared = len(found) - len(refused)
    summary = f"{compared - len(different)} of {compared} as on the CPU"
    summary += f"; different: {', '.join(different)}" if different else ""
    summary += f"; refused here: {', '.join(refused)}" if refused else ""
    return {"right": not different, "told": summary, "each": found}


def parted(expected: list[list[int]], got: list[list[int]]) -> str:
    """Whether texts are the same, and else where they part."""
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one != other:
            index = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)),
            )
            return f"differs in text {number} at token {index} of {len(one)}"
    return "same"


def graphs(context: Context) -> dict[str, Any]:
    """Compares texts and logits with CUDA graphs to those without, on the device named by its
    number."""
    if not context.on_cuda:
        return {"right": None, "told": "not asked: a CPU has no CUDA graphs"}
    parts = parts_of(("none", "draft-model", "eagle3"), context.device)
    on, off = (
        demo(context, context.device, list(parts.values()), mode) for mode in ("graphs", "eager")
    )
    assert isinstance(on.target.lm.run, GraphedPass)
    assert not isinstance(off.target.lm.run, GraphedPass)
    found = {
        f"{name}, {kind}": parted(
            texts_of(context, off, mine, kind), texts_of(context, on, mine, kind)
        )
        for name, mine in parts.items()
        for kind in KINDS
    }
    same_bits = torch.equal(probe_logits(on.target.lm), probe_logits(off.target.lm))
    different = [name for name, result in found.items() if result != "same"]
    summary = f"{len(found) - len(different)} of {len(found)} texts the same, logits {'' if same_bits else 'not '}to the bit"
    recorded = len(on.target.lm.run.graphs)
    return {
        "right": not different,
        "told": summary,
        "each": found,
        "same_bits": same_bits,
        "recorded": recorded,
    }


def bits(context: Context) -> dict[str, Any]:
    """What was measured of the bits of passes, in each dtype; what is not exact is named. Nothing
    here is wrong by itself."""
    found: dict[str, Any] = {}
    parts = parts_of(("none",), context.device)["none"]
    for dtype in ("float32",) if context.tiny else ("bfloat16", "float16", "float32"):
        models = demo(context, context.device, [parts], mode_of(context), dtype)
        limits = models.target.lm.limits
        found[dtype] = {
            "exact": assemble(models, parts).config()["exact"],
            "exact_rows": limits.exact_rows,
            "exact_trees": limits.exact_trees,
            "granularity": limits.granularity,
            "max_tokens_per_pass": limits.max_tokens_per_pass,
            "notes": models.notes,
        }
    lacking = [
        f"{dtype} ({what})"
        for dtype, one in found.items()
        for what in ("rows", "trees")
        if not one[f"exact_{what}"]
    ]
    return {
        "right": None,
        "told": "not exact to the bit: " + (", ".join(lacking) or "nothing"),
        "each": found,
    }


def law(context: Context) -> dict[str, Any]:
    """G-tests of drawn tokens against the target's own distribution on its real logits, with a
    draft model."""
    params = SamplingParams(temperature=1.0, max_tokens=TINY_TOKENS)
    subject = Subject.open(options(context.device, mode_of(context), "draft-model"))
    tokenizer: Any = subject.built.target.tokenizer
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    found = Draws(
        subject, prompts, params, TINY_SAMPLES if context.tiny else SAMPLES, 0, Journal()
    ).section()
    verdict = {"passed": True, "failed": False}.get(found.status)
    return {
        "right": verdict,
        "told": f"{found.status}: {found.why}",
        "detectable": found.finds("texts"),
    }
