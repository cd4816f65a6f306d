"""The training loop of the demo pair: cross entropy for the target, distillation for the draft.

Resumable: a checkpoint holds weights, optimizer states, the step and the seconds used; batches
depend only on (seed, step), so a run of N steps cut anywhere and resumed ends with the same weights
as one that was not. With a budget in minutes the schedule follows the clock instead, and only the
part already used is exact.

Precision: fp32 master weights, bf16 autocast; no gradient scaling is needed for bf16.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_models.corpus import BOS_ID, EOS_ID, Batch
from tools.demo_models.optimizer import Optimizers, warmup_stable_decay


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int = 4096
    context: int = 1024


TARGET_SHAPE = Shape(hidden=384, layers=8, heads=6, kv_heads=2, mlp=1024)
DRAFT_SHAPE = Shape(hidden=128, layers=3, heads=4, kv_heads=2, mlp=384)


@dataclass(frozen=True)
class Plan:
    """How one model is trained. Exactly one of `steps` and `minutes` ends it."""

    steps: int | None = None
    minutes: float | None = None
    rows: int = 16
    length: int = 256  # most steps: nearly every document fits, and attention is cheap
    # a step in 8 at twice, a step in 32 at four times the length
    longer_every: tuple[int, ...] = (8, 32)
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    seed: int = 1
    save_every_s: float = 240.0
    compile: bool = True
    device: str = "cpu"
    stop_after: int | None = None  # end early at this step, as an interruption would

    def progress(self, step: int, used_s: float) -> float:
        done = step / self.steps if self.steps else used_s / (60 * (self.minutes or 1.0))
        return min(done, 1.0)

    def rows_and_length(self, step: int) -> tuple[int, int]:
        """Rows and length of a step's batch: a constant number of tokens, now and then in fewer and
        longer rows."""
        factor = 2 ** sum(step % every == every - 1 for every in self.longer_every)
        return self.rows // factor, self.length * factor


def new_model(shape: Shape, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


# ------------------------------------------------------------------------------------------------- losses
# (rows, L + 1) tokens, (rows, L) weights, progress -> scalar
Loss = Callable[[Tensor, Tensor, float], Tensor]
BatchOf = Callable[[int, float, int, int], Batch]  # step, progress, rows, length


def _weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights.flatten()).sum() / weights.sum()


def cross_entropy_loss(model: LlamaForCausalLM, plan: Plan) -> Loss:
    def loss(tokens: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast(plan.device, torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        return _weighted_mean(losses, weights)

    run = torch.compile(loss, dynamic=False) if plan.compile else loss
    return lambda tokens, weights, progress: run(tokens, weights)


def distillation_loss(
    model: LlamaForCausalLM, target: LlamaForCausalLM, plan: Plan, plain_until: float = 0.3
) -> Loss:
    """Cross entropy on the text first, then on the target's full distribution (KL up to the
    target's entropy).
    """
    plain = cross_entropy_loss(model, plan)
    target.requires_grad_(False).eval()

    def soft(tokens: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast(plan.device, torch.bfloat16):
            wanted = target(input_ids=tokens[:, :-1], use_cache=False).logits
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        wanted = wanted.float().flatten(0, 1).softmax(-1)
        losses = -(wanted * logits.float().flatten(0, 1).log_softmax(-1)).sum(-1)
        return _weighted_mean(losses, weights)

    run = torch.compile(soft, dynamic=False) if plan.compile else soft
    return lambda tokens, weights, progress: (
        plain(tokens, weights, progress) if progress < plain_until else run(tokens, weights)
    )


# --------------------------------------------------------------------------------------------------- loop
@dataclass
class Progress:
    step: int = 0
    num_tokens: int = 0
    used_s: float = 0.0
    loss: float = 0.0  # running mean


@contextmanager
def interrupt_between_steps() -> Iterator[Callable[[], bool]]:
    """Ctrl-C only sets a flag: a checkpoint must not hold weights that half an optimizer step has
    changed."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


class Run:
    """One model's training: owns its optimizers and its checkpoint file."""

    def __init__(self, model: LlamaForCausalLM, plan: Plan, checkpoint: Path) -> None:
        self.model = model.to(plan.device)
        self.plan = plan
        self.checkpoint = checkpoint
        self.optimizers = Optimizers(model, plan.muon_lr, plan.adam_lr)
        self.at = Progress()
        if checkpoint.exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.plan.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.at = Progress(**state["at"])

    def save(self) -> None:
        """Atomic: a cut in the middle leaves the previous checkpoint."""
        part = self.checkpoint.with_suffix(".part")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizers": self.optimizers.state_dict(),
                "at": vars(self.at),
            },
            part,
        )
        os.replace(part, self.checkpoint)

    @property
    def progress(self) -> float:
        return self.plan.progress(self.at.step, self.at.used_s)

    def train(
        self, batch_of: BatchOf, loss: Loss, on_save: Callable[[], None] = lambda: None
    ) -> Progress:
        """Train until the plan's end. Ctrl-C saves, then goes on to the caller."""
        plan = self.plan
        at = self.at
        saved = time.monotonic()
        bar = tqdm(
            total=1000,
            initial=int(1000 * self.progress),
            mininterval=5,
            desc=self.checkpoint.stem,
            bar_format="{desc} {percentage:5.1f}% [{elapsed}<{remaining}] {postfix}",
        )
        try:
            with interrupt_between_steps() as is_interrupted:
                while self.progress < 1.0 and at.step != plan.stop_after and not is_interrupted():
                    self._step(batch_of, loss)
                    bar.update(int(1000 * self.progress) - bar.n)
                    bar.set_postfix_str(
                        f"step {at.step} loss {at.loss:.3f} {at.num_tokens / 1e6:.2f}M tokens "
                        f"{at.num_tokens / at.used_s:.0f}/s",
                        refresh=False,
                    )
                    if time.monotonic() - saved > plan.save_every_s:
                        self.save()
                        on_save()
                        saved = time.monotonic()
                if is_interrupted():
                    raise KeyboardInterrupt
        finally:
            bar.close()
            self.save()
            on_save()
        return at

    def _step(self, batch_of: BatchOf, loss: Loss) -> None:
        plan = self.plan
        at = self.at
        began = time.monotonic()
        progress = self.progress
        rows, length = plan.rows_and_length(at.step)
        drawn = batch_of(at.step, progress, rows, length)
        tokens, weights = (
            torch.from_numpy(part).to(plan.device) for part in (drawn.tokens, drawn.weights)
        )
        value = loss(tokens, weights, progress)
        value.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.step(warmup_stable_decay(at.step, progress))
        # sync: once a step
        at.loss = value.item() if at.step == 0 else 0.98 * at.loss + 0.02 * value.item()
        at.step += 1
        at.num_tokens += rows * length
        at.used_s += time.monotonic() - began
