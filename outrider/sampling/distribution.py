"""Logits -> law: the ONLY place where logits become probabilities, for target and drafters alike.

Order: allowed-token mask, a grammar's mask and logit bias; repetition penalty (prompt and output); presence and frequency
penalties (output); then a point mass at the largest score (lowest id among equals) for greedy rows, or
temperature, top-k, top-p, min-p and softmax: transformers' order and results. Penalties follow the draft
path: output m is penalised for the committed tokens plus the nodes that lead to it, so a tree's branches do
not see each other. Grammars (`BatchSampling.constraints`) are asked along the same path; what they forbid is
-inf from the start, so top-k and top-p count among allowed tokens only.

Greedy as a one-hot law makes greedy decoding the case p in {0, 1} of every verifier: no separate
branch anywhere. A row's law is a function of that row alone, to the last bit. Mathematics:
docs/algorithms/distribution.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ConfigError, NumericalError
from outrider.sampling.constraint import Constraint, path_masks
from outrider.sampling.history import History, path_counts
from outrider.sampling.params import SamplingParams
from outrider.sampling.warpers import Warpers
from outrider.types import Draft

__all__ = [
    "BatchSampling",
    "DistributionKernel",
    "History",
    "adjusted_scores",
    "distribution",
    "greedy_choice",
]

# A fast way from scores (B, M, V), every row's `BatchSampling.options` and the draft to laws; None
# where it does not serve, or where there is something to refuse.
DistributionKernel = Callable[[Tensor, Tensor, Draft | None], Tensor | None]


@dataclass(frozen=True)
class BatchSampling:
    """The sampling options of a batch as tensors, built once per change of the batch. Off for all
    rows = None.
    """

    num_rows: int
    vocab_size: int
    needs_history: bool  # some row has a penalty: `distribution` wants a History
    bias: Tensor | None  # (B, 1, V) fp64: logit bias, -inf where a token is not allowed
    repetition: Tensor | None  # (B, 1, 1) fp64
    presence: Tensor | None  # (B, 1, 1) fp64
    frequency: Tensor | None  # (B, 1, 1) fp64
    greedy_rows: Tensor  # (G,) int64
    sampled_rows: Tensor  # (S,) int64
    warpers: Warpers  # of the sampled rows
    # (B, 4) fp64 on the host: temperature (0: greedy), top-k (0: off), top-p, min-p, for a
    # `DistributionKernel`
    options: Tensor
    constraints: tuple[Constraint | None, ...] | None = None  # per row; None: no row has one

    @property
    def is_greedy(self) -> bool:
        """No row is sampled."""
        return self.sampled_rows.numel() == 0

    @property
    def is_plain_greedy(self) -> bool:
        """Every row's choice is the largest of the logits as they come."""
        return (
            self.is_greedy
            and self.bias is None
            and self.constraints is None
            and not self.needs_history
        )

    @classmethod
    def of(
        cls,
        params: list[SamplingParams],
        vocab_size: int,
        device: torch.device | str = "cpu",
        constraints: Sequence[Constraint | None] = (),
    ) -> BatchSampling:
        """`constraints`: one a row, or none at all. Raises ConfigError when a bias or an allowed id
        lies outside the vocabulary.
        """
        sampled = [row for row, p in enumerate(params) if not p.is_greedy]
        greedy = [row for row, p in enumerate(params) if p.is_greedy]
        return cls(
            num_rows=len(params),
            vocab_size=vocab_size,
            needs_history=any(p.needs_history for p in params),
            bias=_bias_table(params, vocab_size, device),
            repetition=_column([p.repetition_penalty for p in params], 1.0, device),
            presence=_column([p.presence_penalty for p in params], 0.0, device),
            frequency=_column([p.frequency_penalty for p in params], 0.0, device),
            greedy_rows=torch.tensor(greedy, dtype=torch.int64, device=device),
            sampled_rows=torch.tensor(sampled, dtype=torch.int64, device=device),
            warpers=Warpers.of([params[row] for row in sampled], vocab_size, device),
            options=torch.tensor([_options(p, vocab_size) for p in params], dtype=torch.float64),
            constraints=tuple(constraints) if any(c is not None for c in constraints) else None,
        )


def distribution(
    logits: Tensor,  # (B, M, V) any float dtype
    sampling: BatchSampling,
    history: History | None = None,
    draft: Draft | None = None,
    dtype: torch.dtype = torch.float32,
    first_node: int = 0,
    *,
    drafting: bool = False,
    kernel: DistributionKernel | None = None,
) -> Tensor:  # (B, M, V) dtype
    """The law of the next token at outputs first_node .. first_node + M - 1 of a pass over `draft`.

    `history` holds the committed tokens and `draft` the nodes (needed only with penalties and
    grammars; a drafter that has drafted i tokens asks for its next law with first_node=i, M=1).
    `drafting`: a law to draw drafts from, which is cheaper (`Warpers.draft_law`). Outputs of
    padding nodes get some law, never an error. `kernel`: makes the laws of a whole pass where it
    can. Raises NumericalError naming the row when scores are NaN, infinite, or all masked.
    """
    _check_arguments(logits, sampling, history)
    scores = _adjusted(logits, sampling, history, draft, dtype, first_node)
    if kernel is not None and (result := kernel(scores, sampling.options, draft)) is not None:
        return result
    if sampling.is_greedy:
        law, witness = _point_mass(scores, dtype)
    elif sampling.greedy_rows.numel() == 0:
        law = _warped(scores.to(dtype), sampling, drafting)
        witness = law[..., 0]
    else:
        law, witness = _mixed(scores, sampling, dtype, drafting)
    # sync: one number; an overflow of the sum only costs a closer look
    if not math.isfinite(witness.sum()):
        _refuse_or_patch(law, witness, draft, first_node)
    return law


def greedy_choice(
    logits: Tensor,
    sampling: BatchSampling,
    history: History | None = None,
    draft: Draft | None = None,
) -> list[list[int]]:
    """The tokens on which `distribution` puts its point masses when all rows are greedy: same
    scores, same refusals, no law. M a row."""
    scores = adjusted_scores(logits, sampling, history, draft)
    # right after a pass, which drove code out of the caches: no torch but for 16-bit floats
    if scores.device.type == "cpu":
        known = _readable(scores)
        best = known.argmax(axis=-1).tolist()
        peaks = [
            known.item(row, node, token)
            for row, line in enumerate(best)
            for node, token in enumerate(line)
        ]
    else:
        largest = scores.max(dim=-1)
        # sync: one copy
        places, values = torch.stack([largest.indices.double(), largest.values.double()]).tolist()
        best = [[int(one) for one in line] for line in places]
        peaks = [one for line in values for one in line]
    if not math.isfinite(sum(peaks)):
        _refuse(scores.amax(dim=-1), draft, 0)
    return best


def adjusted_scores(
    logits: Tensor, sampling: BatchSampling, history: History | None, draft: Draft | None
) -> Tensor:
    """(B, M, V): what laws are made of, logits with bans, bias and penalties; the logits themselves
    where there are none."""
    _check_arguments(logits, sampling, history)
    return _adjusted(logits, sampling, history, draft, torch.float32, 0)


def _warped(scores: Tensor, sampling: BatchSampling, drafting: bool) -> Tensor:
    return sampling.warpers.draft_law(scores) if drafting else sampling.warpers.law(scores)


def _mixed(
    scores: Tensor, sampling: BatchSampling, dtype: torch.dtype, drafting: bool
) -> tuple[Tensor, Tensor]:
    law = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    witness = torch.empty(scores.shape[:2], dtype=dtype, device=scores.device)
    greedy = sampling.greedy_rows
    sampled = sampling.sampled_rows
    point, peak = _point_mass(scores[greedy], dtype)
    law[greedy], witness[greedy] = point, peak.to(dtype)
    law[sampled] = _warped(scores[sampled].to(dtype), sampling, drafting)
    witness[sampled] = law[sampled, :, 0]
    return law, witness


def _point_mass(scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    peak, best = _first_max(scores)
    law = torch.zeros(scores.shape, dtype=dtype, device=scores.device).scatter_(
        -1, best[..., None], 1.0
    )
    return law, peak


def _first_max(scores: Tensor) -> tuple[Tensor, Tensor]:
    # (..., V) -> peaks and their places (...): the first among equals, and NaN wins, so that the
    # peak tells whether the scores are usable. On the CPU torch looks at one score after the other,
    # NumPy at a vector of them
    if scores.device.type != "cpu":
        peak, best = scores.max(dim=-1)
        return peak, best
    best = torch.from_numpy(np.asarray(_readable(scores).argmax(axis=-1)))
    return scores.gather(-1, best[..., None])[..., 0], best


def _readable(scores: Tensor) -> np.ndarray:
    # NumPy has no bfloat16
    return (scores if scores.dtype in (torch.float32, torch.float64) else scores.float()).numpy()


def _adjusted(
    logits: Tensor,
    sampling: BatchSampling,
    history: History | None,
    draft: Draft | None,
    dtype: torch.dtype,
    first_node: int,
) -> Tensor:
    # mask, bias and penalties; (B, M, V) in dtype, or the logits as they came when there is nothing
    # to adjust
    if sampling.bias is None and sampling.constraints is None and not sampling.needs_history:
        return logits
    scores = logits.to(dtype, copy=sampling.constraints is not None)
    if sampling.constraints is not None:
        for row, mask in path_masks(sampling.constraints, draft, first_node, scores.shape[1]):
            scores[row, : len(mask)].masked_fill_(~mask.to(scores.device), -torch.inf)
    if sampling.bias is not None:
        scores = scores + sampling.bias.to(dtype)
    return (
        scores
        if history is None or not sampling.needs_history
        else _penalised(scores, sampling, history, draft, first_node)
    )


def _penalised(
    scores: Tensor, sampling: BatchSampling, history: History, draft: Draft | None, first_node: int
) -> Tensor:
    counts = history.output_counts[:, None]  # (B, 1, V): the committed history, at every output
    if draft is not None and draft.num_nodes:
        # (B, M, V)
        counts = counts + path_counts(draft, first_node, scores.shape[1], scores.shape[2])
    if sampling.repetition is not None:
        penalty = sampling.repetition.to(scores.dtype)
        seen = history.prompt_mask[:, None] | (counts > 0)
        scores = torch.where(
            seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores
        )
    if sampling.frequency is not None:
        scores = scores - sampling.frequency.to(scores.dtype) * counts
    if sampling.presence is not None:
        scores = scores - sampling.presence.to(scores.dtype) * (counts > 0)
    return scores


def _check_arguments(logits: Tensor, sampling: BatchSampling, history: History | None) -> None:
    if (
        logits.dim() != 3
        or logits.shape[0] != sampling.num_rows
        or logits.shape[2] != sampling.vocab_size
    ):
        wanted = f"({sampling.num_rows}, M, {sampling.vocab_size})"
        raise ValueError(f"logits (B, M, V) must be {wanted}, got {tuple(logits.shape)}")
    if sampling.needs_history and history is None:
        raise ValueError("a row has penalties: distribution() needs the History of the batch")


def _refuse_or_patch(law: Tensor, witness: Tensor, draft: Draft | None, first_node: int) -> None:
    # raise for an output that counts; give padding outputs a harmless point mass
    broken = _refuse(witness, draft, first_node)
    law[broken] = 0
    law[..., 0].masked_fill_(broken, 1)


def _refuse(witness: Tensor, draft: Draft | None, first_node: int) -> Tensor:
    # witness (B, M): raise when an output that counts is not finite; returns (B, M) bool, which are
    # not
    broken = ~torch.isfinite(witness)
    counted = torch.ones_like(broken)
    if draft is not None:
        output = torch.arange(first_node, first_node + broken.shape[1], device=broken.device)
        counted = output <= draft.lengths[:, None]
    if (broken & counted).any():
        row, output = (broken & counted).nonzero()[0].tolist()
        raise NumericalError(
            f"row {row}, output {first_node + output}: the logits are NaN, infinite or all masked "
            "out: no"
            " law to sample from; check the model's dtype and weights, or the tokens that "
            "allowed_token_ids,"
            " logit_bias, bad_words and a grammar leave"
        )
    return broken


def _options(params: SamplingParams, vocab_size: int) -> tuple[float, int, float, float]:
    # as `Warpers` has them
    if params.is_greedy:
        return 0.0, 0, 1.0, 0.0
    return params.temperature, min(max(params.top_k, 0), vocab_size), params.top_p, params.min_p


def _column(values: list[float], off: float, device: torch.device | str) -> Tensor | None:
    if all(value == off for value in values):
        return None
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None, None]


def _bias_table(
    params: list[SamplingParams], vocab_size: int, device: torch.device | str
) -> Tensor | None:
    if all(p.logit_bias is None and p.allowed_token_ids is None for p in params):
        return None
    table = torch.zeros(len(params), vocab_size, dtype=torch.float64)
    for row, p in enumerate(params):
        for name, ids in (
            ("allowed_token_ids", p.allowed_token_ids or []),
            ("logit_bias", p.logit_bias or {}),
        ):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                raise ConfigError(
                    f"{name} names token {outside[0]}, but the vocabulary has {vocab_size} tokens"
                )
        if p.allowed_token_ids is not None:
            table[row] = -torch.inf
            table[row, p.allowed_token_ids] = 0
        for token, bias in (p.logit_bias or {}).items():
            table[row, token] += bias
    return table[:, None].to(device)
