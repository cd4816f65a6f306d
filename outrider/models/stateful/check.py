"""How a model may be fed on transformers' own cache: found by trying, against the model's own logits, before its first token.

Tried are prefill, single tokens, chains, rejections and going on after them, on two rows in turns. What transformers' code gets
wrong shows here: passes of several tokens that forget the state (Mamba, RecurrentGemma), caches that lose their place. A model
that keeps no state, or whose cache cannot be trusted, reads every text anew. Some models write, behind a token, something else
than a pass over a longer text has there: these read the text anew for each token (`AnewRun`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.errors import CapabilityError, NumericalError
from outrider.kv import LayerShape
from outrider.kv.cache import BLOCK
from outrider.kv.states import MAX_SNAPSHOTS
from outrider.models.lm import LMShape, PassLimits
from outrider.models.loading.unsupported import ENCODER, is_decoder, sees_later
from outrider.models.probes.probe import broken_weight, difference, is_rounding, probe_tokens, tolerance
from outrider.models.probes.reference import plain_logits, writes_otherwise
from outrider.models.quantised.scheme import has_experts
from outrider.models.stateful.lm import Feeding, StateLM
from outrider.models.stateful.run import AnewRun, OwnCacheRun, find_held, message

UNKNOWN_LAYER = LayerShape(0, 0, 0)  # in the shape of a model whose layers are transformers' to know
NUM_TOKENS = 14
MIDDLE = NUM_TOKENS // 2
# and whether it keeps a state
WAYS = ((Feeding(), True), (Feeding(min_tokens=2), True), (Feeding(max_tokens=1), True), (Feeding(), False))
LONG = 300  # tokens: more than a chunk of code that attends within chunks


def state_lm(module: Any, name: str, shape: LMShape, dtype: torch.dtype, device: torch.device, why: str) -> StateLM:
    """An `LM` around a module on its own cache, fed in the first way that gives its own logits.

    `why`: the reason that our cache does not serve it. Raises CapabilityError, with that reason, where no way does.
    """
    tokens = probe_tokens(shape.vocab_size, 2 * NUM_TOKENS, device).view(2, NUM_TOKENS)
    try:
        with torch.inference_mode():
            plain = plain_logits(module, tokens)
        is_plain = _tells_what_it_writes(module, plain[:1, MIDDLE : MIDDLE + 1], tokens[0, : MIDDLE + 1], dtype)
        is_encoder = not is_decoder(module.config) and sees_later(module, tokens)
        held = find_held(module)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if module.config.get_text_config() is not module.config:
            raise CapabilityError(
                f"{name} ({module.config.model_type}): its code reads no text without a picture or a sound: {message(error)}"
            ) from error
        raise CapabilityError(f"{name}: {why}. And its own code fails in a pass over a few tokens: {message(error)}") from error
    if not torch.isfinite(plain).all():
        raise NumericalError(
            f"{name}: the model's own logits are NaN or infinite in {str(dtype).removeprefix('torch.')}: {broken_weight(module)}"
        )
    if is_encoder:
        raise CapabilityError(f"{name} ({module.config.model_type}): {ENCODER}")
    wrong: list[str] = []
    for feeding, keeps_state in WAYS[_steps_are_others(module) :] if is_plain else ():
        way = str(feeding) if keeps_state else "every text anew"
        try:
            run = OwnCacheRun(module, held, keeps_state=keeps_state)
            lm = StateLM(run, shape, dtype, device, feeding=feeding, bytes_per_token=_bytes_per_token(run, tokens), why=why)
            worst = difference(_fed(lm, tokens), plain, lm.dtype, picks_experts=has_experts(module.config))
            is_right = is_rounding(worst, module, lm.dtype)
            if is_right and (keeps_state or _holds_in_a_long_text(run, _long_text(shape, device), dtype)):
                return lm
        except Exception as error:  # foreign code: whatever it raises is reported
            if isinstance(error, torch.OutOfMemoryError):
                raise
            wrong.append(f"{way}: {message(error)}")
            continue
        wrong.append(f"{way}: {worst:.1%} off" if not is_right else f"{way}: other logits in a longer text")
    try:
        _check_it_repeats(module, _long_text(shape, device))
    except CapabilityError as error:
        tried = "; ".join([*wrong, message(error)])
        raise CapabilityError(
            f"{name}: {why}. Nor does it give its own logits on transformers' cache (allowed {tolerance(dtype):.1%}; {tried})."
        ) from error
    return StateLM(AnewRun(module), shape, dtype, device, feeding=Feeding(max_tokens=1), bytes_per_token=1, why=why)


@torch.inference_mode()
def _tells_what_it_writes(module: Any, passed: Tensor, text: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits (1, 1, V) behind a text, from a pass over more, are those that `generate` takes the next token from."""
    if not hasattr(module, "prepare_inputs_for_generation"):  # a checkpoint's own class, which does not generate
        return True
    written, _, _ = AnewRun(module).feed(None, 0, text.tolist(), torch.tensor([len(text) - 1]))
    return difference(passed, written, dtype, picks_experts=has_experts(module.config)) <= tolerance(dtype)


@torch.inference_mode()
def _holds_in_a_long_text(run: OwnCacheRun, text: Tensor, dtype: torch.dtype) -> bool:
    """Whether passes over a long text, too, have the logits that `generate` takes the next token from."""
    middle = len(text) // 2
    passed, _, _ = run.feed(None, 0, text.tolist(), torch.tensor([middle], device=text.device))
    return _tells_what_it_writes(run.module, passed, text[: middle + 1], dtype)


@torch.inference_mode()
def _check_it_repeats(module: Any, text: Tensor) -> None:
    """Raise CapabilityError for a model that no pass over the whole text serves, either."""
    if writes_otherwise(module):
        raise CapabilityError("it has a `generate` of its own, which does not write token by token")
    first, again = (AnewRun(module).feed(None, 0, text.tolist(), torch.tensor([len(text) - 1]))[0] for _ in range(2))
    if not torch.equal(first, again):
        raise CapabilityError("two passes over one text give different logits, so it has no greedy text")


def _long_text(shape: LMShape, device: torch.device) -> Tensor:
    return probe_tokens(shape.vocab_size, min(LONG, shape.context_length), device)[0]


def _steps_are_others(module: Any) -> bool:
    """Whether transformers' code of single tokens leaves out Mamba 2's least time step, which its code of several has: how far
    they differ depends on the text, so a few tokens do not show it (Nemotron-H, Zamba 2)."""
    limits = (getattr(part, "time_step_limit", None) for part in module.modules())
    return any(limit is not None and limit[0] > 0 for limit in limits)


def find_state_limits(lm: StateLM) -> PassLimits:
    """What keeps a row's bits. Rows run alone, so neighbours cannot matter; how a text is cut into passes can, unless each of its
    tokens has a pass of its own."""
    return PassLimits(granularity=1, exact_trees=False, exact_rows=lm.feeding.max_tokens == 1)


@torch.inference_mode()
def _fed(lm: StateLM, tokens: Tensor) -> Tensor:
    """Logits (2, T, V) of both texts, in turns: cut into passes, with tokens fed and rejected in between.

    Only the first one's prompt is read as a prompt.
    """
    kv, parts = lm.kv, list[Tensor]()
    wrong = tokens.flip(1)
    for _ in tokens:
        kv.add_row()

    def passed(start: int, end: int, kept: int, rejected: int = 0) -> None:
        """Feed start..end, and some wrong tokens behind; keep the first `kept`. Row by row, as rows of other lengths would be."""
        rows = [torch.cat([tokens[row, start:end], wrong[row, :rejected]])[None] for row in range(2)]
        prompt = torch.arange(end - start, device=tokens.device) if start == 0 else None
        logits = [lm.forward(ids, columns=None if row else prompt, first_row=row).logits for row, ids in enumerate(rows)]
        for row in range(2):
            kv.keep(row, range(kept))
        parts.append(torch.cat(logits)[:, :kept])

    passed(0, 5, 5)  # a prompt
    passed(5, 6, 1, rejected=3)  # all of a draft rejected
    passed(6, 7, 1)  # no draft after one that was rejected
    passed(7, 8, 1)
    passed(8, 11, 2)  # a part of a draft rejected
    passed(10, 11, 1, rejected=2)  # and again
    passed(11, 14, 3)  # all of one kept
    for row in (1, 0):
        kv.swap_remove(row)
    return torch.cat(parts, dim=1)


@torch.inference_mode()
def _bytes_per_token(run: OwnCacheRun, tokens: Tensor) -> int:
    """Bytes per token of a long text's state: what each token adds, and its share of what is always there.

    The share is that of a text of one block. Snapshots are counted in: keys and values once, what cannot be shared between
    them several times.
    """
    if not run.keeps_state:
        return 1
    few, more = 4, NUM_TOKENS
    none = torch.zeros(0, dtype=torch.int64, device=tokens.device)
    sizes = []
    for count in (few, more):
        _, _, state = run.feed(None, 0, tokens[0, :count].tolist(), none)
        assert state is not None
        sizes.append((state.num_bytes, state.mark().num_bytes))
    growth = max(0, sizes[1][0] - sizes[0][0]) / (more - few)
    fixed = max(0.0, sizes[0][0] - growth * few) + MAX_SNAPSHOTS * sizes[0][1]
    return max(1, round(growth + fixed / BLOCK))
