"""The check of a model on transformers' own cache before its first token: its passes give its own
logits.

Tried are a prompt, single tokens, chains, rejections and continuing after them, on two rows in
turns. What transformers' code gets wrong shows here: passes of several tokens that forget the
state, caches that lose their place. There is one way to feed a model (`lm.py`); where it gives
other logits, the model is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.errors import CapabilityError, NumericalError
from outrider.kv.cache import BLOCK
from outrider.kv.states import MAX_SNAPSHOTS
from outrider.models.lm import PassLimits
from outrider.models.probes.probe import (
    difference,
    is_rounding,
    own_logits,
    probe_tokens,
    tolerance,
)
from outrider.models.probes.reference import next_logits, writes_otherwise
from outrider.models.quantised.scheme import has_experts
from outrider.models.stateful.lm import StateLM
from outrider.models.stateful.run import OwnCacheRun, message

NUM_TOKENS = 14
MIDDLE = NUM_TOKENS // 2
# rows run alone; how a text is cut into passes matters
LIMITS = PassLimits(granularity=1, exact_trees=False, exact_rows=False)


@torch.inference_mode()
def check_own_cache(lm: StateLM) -> None:
    """Raise CapabilityError, in one sentence, for a model that passes on transformers' cache do not
    serve.

    The cache is empty, before and after.
    """
    module = lm.own_run.module
    tokens = probe_tokens(lm.shape.vocab_size, 2 * NUM_TOKENS, lm.device).view(2, NUM_TOKENS)
    try:
        plain = own_logits(module, lm.name, lm.dtype, tokens)
        what = _why_no_pass_tells(lm, plain, tokens)
        if what is None:
            lm.count_as(_bytes_per_token(lm.own_run, tokens))
            worst = difference(
                _fed(lm, tokens), plain, lm.dtype, picks_experts=has_experts(module.config)
            )
            if is_rounding(worst, module, lm.dtype):
                return
            what = f"there its logits are {worst:.1%} off (allowed {tolerance(lm.dtype):.1%})"
    except (NumericalError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is reported
        what = f"there its code fails in a pass over a few tokens: {message(error)}"
    needs = (
        f"{lm.name} ({module.config.model_type}) needs transformers' own cache ({lm.why_own_cache})"
    )
    raise CapabilityError(f"{needs}, and {what}. See docs/support.md.")


def _why_no_pass_tells(lm: StateLM, plain: Tensor, tokens: Tensor) -> str | None:
    """Why passes over texts (2, T), with these logits, do not tell what `generate` writes after
    each of their tokens."""
    module = lm.own_run.module
    if writes_otherwise(module):
        return "it has a `generate` of its own, which need not write token by token"
    if _steps_are_others(module):
        return "there a single token is computed by other code than several, with another result"
    written = next_logits(module, tokens[:1, : MIDDLE + 1])
    tells = plain.shape[1] == NUM_TOKENS and tolerance(lm.dtype) >= difference(
        plain[:1, MIDDLE], written, lm.dtype, picks_experts=has_experts(module.config)
    )
    return (
        None
        if tells
        else "a pass over a text does not tell what it writes after each token, as with encoders such as BERT"
    )


def _steps_are_others(module: Any) -> bool:
    """Whether transformers' code of single tokens leaves out Mamba 2's least time step, which its
    code of several has: how far they differ depends on the text, so a few tokens do not show it."""
    limits = (getattr(part, "time_step_limit", None) for part in module.modules())
    return any(limit is not None and limit[0] > 0 for limit in limits)


def _fed(lm: StateLM, tokens: Tensor) -> Tensor:
    """Logits (2, T, V) of both texts, in turns: cut into passes, with tokens fed and rejected in
    between.

    Only the first one's prompt is read as a prompt.
    """
    kv = lm.kv
    parts = list[Tensor]()
    wrong = tokens.flip(1)
    for _ in tokens:
        kv.add_row()

    def passed(start: int, end: int, num_kept: int, rejected: int = 0) -> None:
        """Feed start..end, then some wrong tokens; keep the first `num_kept`. Row by row, as rows of
        other lengths would be."""
        rows = [
            torch.cat([tokens[row, start:end], wrong[row, :rejected]])[None] for row in range(2)
        ]
        prompt = torch.arange(end - start, device=tokens.device) if start == 0 else None
        logits = [
            lm.forward(ids, columns=None if row else prompt, first_row=row).logits
            for row, ids in enumerate(rows)
        ]
        for row in range(2):
            kv.keep(row, range(num_kept))
        parts.append(torch.cat(logits)[:, :num_kept])

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


def _bytes_per_token(run: OwnCacheRun, tokens: Tensor) -> int:
    """Bytes per token of a long text's state: what each token adds, and its share of what is always
    there.

    The share is that of a text of one block. Snapshots are counted in: keys and values once, what
    cannot be shared between them several times.
    """
    few = 4
    more = NUM_TOKENS
    none = torch.zeros(0, dtype=torch.int64, device=tokens.device)
    sizes = []
    for count in (few, more):
        _, _, state = run.feed(None, 0, tokens[0, :count].tolist(), none)
        sizes.append((state.num_bytes, state.mark().num_bytes))
    growth = max(0, sizes[1][0] - sizes[0][0]) / (more - few)
    fixed = max(0.0, sizes[0][0] - growth * few) + MAX_SNAPSHOTS * sizes[0][1]
    return max(1, round(growth + fixed / BLOCK))
