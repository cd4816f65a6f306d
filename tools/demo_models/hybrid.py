"""The recipe of a small hybrid with an MTP head: Qwen3.5's shape and its head's layout, trained on
the demo's problems.

    python -m tools.demo_models.hybrid --out runs/hybrid --minutes 35 --head-minutes 15

Published hybrids of this family are too large for a benchmark that anybody can repeat. First the
target (three gated delta nets to one attention layer) learns problems of grades 1 to 3: it begins
with the embeddings and MLPs of the demo's target, and learns from that model's distributions. Then
the recipe of `outrider train mtp` trains its head on the same texts. The folder holds the
checkpoint as published ones are: the head's tensors (`mtp.*`) lie beside the target's. Batches are
a function of seed and step; the same command continues an interrupted run. Held-out problems are
never drawn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from outrider.demo import demo_paths
from outrider.models.signals import Listening
from outrider.train.mtp import MtpRecipe, MtpTraining
from outrider.train.recipe import FeatureBatch, RecipeSetup
from tools.demo_models import corpus, tokenizer
from tools.demo_models.problems import problems
from tools.demo_models.train import Loss, Plan, Run, distillation_loss

GRADES = {1: 0.3, 2: 0.5, 3: 0.2}
SEED = 1
ROWS = 8
LENGTH = 112
WEIGHTS = "model.safetensors"
SHAPE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 64, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "tie_word_embeddings": True, "max_position_embeddings": 1024,
    "bos_token_id": corpus.BOS_ID, "eos_token_id": corpus.EOS_ID, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class HybridRecipe:
    """A hybrid to be made: its shape, its folder, and how long target and head are trained."""

    out: Path
    target: Plan
    head: Plan
    shape: dict[str, Any] = field(default_factory=lambda: SHAPE)

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint, head included."""
        return self.out / "target"


class Texts:
    """Batches of problems with their solutions, a function of seed and step."""

    def __init__(self, seed: int) -> None:
        self._encoder = Tokenizer.from_file(str(demo_paths().target / "tokenizer.json"))
        marker = self._encoder.encode(corpus.ANSWER_MARKER, add_special_tokens=False).ids
        self._marker = np.asarray(marker, dtype=np.uint16)
        self._seed = seed

    def batch(self, step: int, progress: float, rows: int, length: int) -> corpus.Batch:
        """Rows begin with a document; the last one of a row is cut."""
        documents = self._documents(self._seed * 1_000_003 + step)
        tokens = np.zeros((rows, length + 1), dtype=np.int64)
        weights = np.zeros((rows, length + 1), dtype=np.float32)
        for row in range(rows):
            filled = 0
            while filled <= length:
                ids = next(documents)[: length + 1 - filled]
                counts = np.ones(len(ids), dtype=np.float32)
                counts[: corpus.answer_start(ids, self._marker)] = corpus.PROMPT_WEIGHT
                (
                    tokens[row, filled : filled + len(ids)],
                    weights[row, filled : filled + len(ids)],
                ) = ids, counts
                filled += len(ids)
        return corpus.Batch(tokens, weights[:, 1:])

    def _documents(self, seed: int) -> Iterator[np.ndarray]:
        for problem in problems(seed, weights=GRADES):
            text = corpus.document(problem.question, problem.solution)
            yield np.asarray(
                self._encoder.encode(text, add_special_tokens=False).ids, dtype=np.uint16
            )


def make_target(recipe: HybridRecipe) -> None:
    """Train the hybrid, and write its checkpoint without a head."""
    torch.manual_seed(recipe.target.seed)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3_5_text", **recipe.shape), dtype=torch.float32
    ).train()
    teacher: Any = AutoModelForCausalLM.from_pretrained(demo_paths().target, dtype=torch.float32)
    begin_like(model, teacher)
    texts = Texts(recipe.target.seed)
    run = Run(model, recipe.target, recipe.out / "target.pt")
    run.train(texts.batch, distillation_loss(model, teacher, recipe.target, plain_until=0.0))
    model.to(torch.bfloat16).save_pretrained(recipe.folder)
    GenerationConfig(bos_token_id=corpus.BOS_ID, eos_token_id=corpus.EOS_ID).save_pretrained(
        recipe.folder
    )
    encoder = Tokenizer.from_file(str(demo_paths().target / "tokenizer.json"))
    tokenizer.as_transformers(encoder).save_pretrained(recipe.folder)
    note(recipe, "target", run)


@torch.no_grad()
def begin_like(model: Any, teacher: Any) -> None:
    """Copy the teacher's embeddings, norms and MLPs; what mixes tokens stays random."""
    own = model.get_decoder()
    known = teacher.get_decoder()
    own.embed_tokens.weight.copy_(known.embed_tokens.weight)
    own.norm.weight.copy_(known.norm.weight - 1)  # Qwen3.5's norms multiply by 1 + weight
    for layer, like in zip(own.layers, known.layers, strict=True):
        layer.mlp.load_state_dict(like.mlp.state_dict())
        for norm in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, norm).weight.copy_(getattr(like, norm).weight - 1)


def make_head(recipe: HybridRecipe) -> None:
    """Train the head, and put it into the checkpoint."""
    torch.manual_seed(recipe.head.seed)
    target = (
        AutoModelForCausalLM.from_pretrained(recipe.folder, dtype=torch.float32)
        .eval()
        .requires_grad_(False)
    )
    counts = torch.ones(recipe.shape["vocab_size"])
    setup = RecipeSetup(target, None, "", MtpTraining(), counts, dtype=torch.bfloat16)
    trained = MtpRecipe.build(setup)
    module: Any = trained.module
    texts = Texts(recipe.head.seed + 1)
    run = Run(module, recipe.head, recipe.out / "head.pt")
    run.train(texts.batch, head_loss(target, trained))
    trained.save(recipe.out / "head")
    put_head(recipe.folder, recipe.out / "head")
    note(recipe, "head", run)


def head_loss(target: Any, recipe: MtpRecipe) -> Loss:
    """The recipe's loss at the answers' tokens, against what the target says there."""
    listening = Listening(target, recipe.signals)

    def loss(tokens: Tensor, weights: Tensor, progress: float) -> Tensor:
        heard: dict[int, Tensor] = {}
        text = tokens[:, :-1]
        mask = weights == 1
        mask[:, -1] = False  # the token behind the text is not in the batch
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), listening.during(heard):
            logits = target(input_ids=text, use_cache=False).logits
        hidden = {key: states.float() for key, states in heard.items()}
        lengths = torch.full((len(text),), text.shape[1])
        return recipe.loss(FeatureBatch(text, mask, hidden, logits.float(), lengths, progress)).loss

    return loss


def put_head(folder: Path, head: Path) -> None:
    """A head's tensors go into a target's checkpoint, as published ones have them."""
    tensors = load_file(folder / WEIGHTS) | load_file(head / WEIGHTS)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps(config | {"mtp_num_hidden_layers": 1}, indent=2), encoding="utf-8"
    )


def note(recipe: HybridRecipe, part: str, run: Run) -> None:
    """Write to `training.json` how long a part was trained, for results."""
    path = recipe.out / "training.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    at = {
        "steps": run.at.step,
        "tokens": run.at.num_tokens,
        "minutes": round(run.at.used_s / 60, 1),
        "loss": run.at.loss,
    }
    path.write_text(
        json.dumps({**known, "seed": recipe.target.seed, part: at}, indent=2), encoding="utf-8"
    )


def make(recipe: HybridRecipe) -> None:
    """Target, then head; what is finished is not made again."""
    recipe.out.mkdir(parents=True, exist_ok=True)
    path = recipe.out / "training.json"
    done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "target" not in done:
        make_target(recipe)
    if "head" not in done:
        make_head(recipe)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_models.hybrid", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the checkpoint (target/)"
    )
    parser.add_argument(
        "--minutes", type=float, default=35.0, help="the target's budget by the clock"
    )
    parser.add_argument("--head-minutes", type=float, default=15.0, help="the head's")
    parser.add_argument("--steps", type=int, help="the target's budget in steps instead")
    parser.add_argument("--head-steps", type=int, help="the head's")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    logging.set_verbosity_error()  # of kernels for GPUs that are not installed
    target = plan(asked.steps, asked.minutes)
    make(HybridRecipe(asked.out, target, plan(asked.head_steps, asked.head_minutes)))


def plan(steps: int | None, minutes: float) -> Plan:
    """A budget in steps, or by the clock."""
    return Plan(
        steps=steps,
        minutes=None if steps else minutes,
        rows=ROWS,
        length=LENGTH,
        longer_every=(),
        muon_lr=0.012,
        adam_lr=0.0024,
        seed=SEED,
        compile=False,
    )


if __name__ == "__main__":
    main()
