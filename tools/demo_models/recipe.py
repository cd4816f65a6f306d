"""The recipe that made the embedded demo pair; run it to make it again, or to make a better one on
a GPU.

    python -m tools.demo_models.recipe --data ../shared/data --out runs/demo --minutes 75
    python -m tools.demo_models.recipe --data ../shared/data --out runs/demo --stage evaluate
    python -m tools.demo_models.recipe --data ../shared/data --out runs/better --init runs/demo

Stages, each resumable and each skipped when its result is already there: corpus (token arrays;
needs the tokenizer), tokenizer, target, draft (distilled from the target), evaluate. `--minutes`
and `--steps` are the budget of the target; the draft gets a quarter of it. The same command
continues an interrupted run. Ctrl-C saves first. `--init` starts from a pair made earlier (its
tokenizer and its weights, at a lower learning rate) instead of from random weights.

What it does not do: tune. The learning rates and the mix are what one CPU run of about an hour was
chosen with.
"""

import argparse
import json
import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

from tools.demo_models import card, corpus, evaluate, tokenizer, train

STAGES = ("tokenizer", "corpus", "target", "draft", "evaluate", "card")
DRAFT_SHARE = 0.25  # of the target's budget
WARM_RATE = 0.6  # of the learning rates, when the weights are not random to begin with


@dataclass(frozen=True)
class Recipe:
    data: Path
    out: Path
    target_plan: train.Plan
    draft_plan: train.Plan
    target_shape: train.Shape = train.TARGET_SHAPE
    draft_shape: train.Shape = train.DRAFT_SHAPE
    init: Path | None = None  # folder with target/ and draft/ to start from
    num_generated: int = 40_000  # problems per grade
    num_validation: int = 200  # held-out problems per grade, for the loss
    num_problems: int = 100  # held-out problems per grade, for the accuracy


# ------------------------------------------------------------------------------------------------- stages
def make_tokenizer(recipe: Recipe) -> None:
    path = recipe.out / "tokenizer.json"
    if path.exists():
        return
    if recipe.init:
        shutil.copyfile(recipe.init / "target" / "tokenizer.json", path)
        return
    texts = [
        text
        for name in corpus.SOURCES
        for text in corpus.source_documents(
            name, recipe.data, held_out=False, num_generated=min(4000, recipe.num_generated)
        )
    ]
    tokenizer.train_tokenizer(texts, recipe.target_shape.vocabulary).save(str(path))


def make_corpus(recipe: Recipe) -> None:
    if (recipe.out / "validation.npz").exists():
        return
    encoder = Tokenizer.from_file(str(recipe.out / "tokenizer.json"))
    for split, count in (("train", recipe.num_generated), ("validation", recipe.num_validation)):
        sources = {}
        for name in corpus.SOURCES:
            texts = corpus.source_documents(
                name, recipe.data, held_out=split == "validation", num_generated=count
            )
            sources[name] = corpus.tokenize(texts, encoder)
            print(
                f"{split} {name}: {len(sources[name])} documents, {len(sources[name].tokens):,} "
                "tokens"
            )
        corpus.save_sources(sources, recipe.out / f"{split}.npz")


def start(recipe: Recipe, name: str, shape: train.Shape, plan: train.Plan) -> LlamaForCausalLM:
    """Random weights, or those of `--init`, in fp32."""
    if not recipe.init:
        return train.new_model(shape, plan.seed)
    return LlamaForCausalLM.from_pretrained(recipe.init / name, dtype=torch.float32)


def batches(recipe: Recipe, plan: train.Plan) -> train.BatchOf:
    encoder = Tokenizer.from_file(str(recipe.out / "tokenizer.json"))
    marker = np.asarray(
        encoder.encode(corpus.ANSWER_MARKER, add_special_tokens=False).ids, dtype=np.uint16
    )
    return partial(corpus.batch, corpus.load_sources(recipe.out / "train.npz"), marker, plan.seed)


def make_target(recipe: Recipe) -> None:
    plan = recipe.target_plan
    model = start(recipe, "target", recipe.target_shape, plan)
    run = train.Run(model, plan, recipe.out / "target.pt")
    run.train(
        batches(recipe, plan),
        train.cross_entropy_loss(model, plan),
        lambda: export(recipe, model, "target"),
    )


def make_draft(recipe: Recipe) -> None:
    plan = recipe.draft_plan
    target = LlamaForCausalLM.from_pretrained(recipe.out / "target", dtype=torch.float32).to(
        plan.device
    )
    model = start(recipe, "draft", recipe.draft_shape, plan)
    run = train.Run(model, plan, recipe.out / "draft.pt")
    loss = train.distillation_loss(model, target, plan)
    run.train(batches(recipe, plan), loss, lambda: export(recipe, model, "draft"))


def make_evaluation(recipe: Recipe) -> None:
    report = evaluate.evaluate_pair(
        recipe.out / "target",
        recipe.out / "draft",
        corpus.load_sources(recipe.out / "validation.npz"),
        recipe.data,
        num_problems=recipe.num_problems,
    )
    for name in ("target", "draft"):
        if (recipe.out / f"{name}.pt").exists():
            state = torch.load(recipe.out / f"{name}.pt", weights_only=True)["at"]
            report[f"{name}_training"] = {**state, "minutes": state.pop("used_s") / 60}
    (recipe.out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def make_card(recipe: Recipe) -> None:
    """`history.md` and `limits.md` in the output folder, where there are any, become prose of the
    card."""
    notes = [recipe.out / name for name in ("history.md", "limits.md")]
    history, limits = (path.read_text(encoding="utf-8") if path.exists() else "" for path in notes)
    card.write(
        recipe.out / "evaluation.json", recipe.out / "README.md", corpus.mix(1.0), history, limits
    )


def export(recipe: Recipe, model: LlamaForCausalLM, name: str) -> None:
    """bf16 weights, tokenizer, chat template and generation settings, as `from_pretrained` reads
    them."""
    folder = recipe.out / name
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder)
    GenerationConfig(bos_token_id=corpus.BOS_ID, eos_token_id=corpus.EOS_ID).save_pretrained(folder)
    tokenizer.as_transformers(
        Tokenizer.from_file(str(recipe.out / "tokenizer.json"))
    ).save_pretrained(folder)


RUN_STAGE = {
    "tokenizer": make_tokenizer,
    "corpus": make_corpus,
    "target": make_target,
    "draft": make_draft,
    "evaluate": make_evaluation,
    "card": make_card,
}


def run(recipe: Recipe, stages: tuple[str, ...] = STAGES) -> None:
    recipe.out.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        print(f"stage {stage}", flush=True)
        RUN_STAGE[stage](recipe)


# ------------------------------------------------------------------------------------------- command line
def parse(arguments: list[str]) -> tuple[Recipe, tuple[str, ...]]:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_models.recipe", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with gsm8k/, math/ and code/"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for checkpoints and results"
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--minutes", type=float, help="the target's budget by the clock (default 75)"
    )
    budget.add_argument("--steps", type=int, help="the target's budget in steps of 4096 tokens")
    parser.add_argument("--draft-minutes", type=float, help="the draft's budget by the clock")
    parser.add_argument("--stage", choices=("all", *STAGES), default="all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--no-compile", action="store_true", help="plain eager steps, about a fifth slower"
    )
    parser.add_argument(
        "--init", type=Path, help="folder with a pair (target/, draft/) to start from"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    minutes = None if options.steps else options.minutes or 75.0
    plan = train.Plan(
        steps=options.steps, minutes=minutes, device=options.device, compile=not options.no_compile
    )
    if options.init:
        plan = replace(plan, muon_lr=WARM_RATE * plan.muon_lr, adam_lr=WARM_RATE * plan.adam_lr)
    draft_plan = replace(
        plan,
        steps=max(1, int(options.steps * DRAFT_SHARE))
        if options.steps and not options.draft_minutes
        else None,
        minutes=options.draft_minutes or (minutes * DRAFT_SHARE if minutes else None),
    )
    recipe = Recipe(
        options.data, options.out, target_plan=plan, draft_plan=draft_plan, init=options.init
    )
    return recipe, STAGES if options.stage == "all" else (options.stage,)


def main(arguments: list[str] | None = None) -> int:
    recipe, stages = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        run(recipe, stages)
    except KeyboardInterrupt:
        print(f"\nstopped; saved under {recipe.out}. The same command continues.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
