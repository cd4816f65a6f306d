"""When to stop drafting early, judged by the draft's own laws.

    entropy    AdaEDL, Agrawal et al. 2410.18351: 1 - sqrt(weight H(q)) bounds the acceptance of a token drawn from q from
               below (Pinsker); drafting stops BEFORE a draw whose bound is under the threshold
    product    the drafted tokens' probabilities under q, multiplied: drafting stops AFTER the token that takes the product
               under the threshold; that token stays in the draft
    acceptance after SpecDec++, Huang et al. 2405.19715: a trained head (models/heads/acceptance.py)
    estimates from the law how
               likely a token drawn from it is accepted, and after the draw how likely this token
               is; drafting stops BEFORE a draw where the drawn tokens' estimates times that of the
               next one are under the threshold

Every rule also ends a draft after a token that ends the row's text: nothing after it can be used.

All keep the output's law: whether a token is drawn depends on the laws and the tokens before it,
never on its own value (non-anticipation). Dropping the unlikely token itself would bias the output
by up to 0.29 in total variation (tests/contract/test_mutations.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.settings import checked, setting


class Predict(Protocol):
    """A trained head."""

    def __call__(
        self, law: Tensor, previous: Tensor, before: Tensor | None, drawn: Tensor | None
    ) -> Tensor:
        """The chance of acceptance (B,) of the next draft token.

        `law` (B, V); `previous` (B,) the tokens before; `before` (B,) the probability each had in
        its own law, None where it was not drafted; `drawn` (B,) the tokens drawn from these laws,
        None before the draw.
        """


@checked()
@dataclass(frozen=True)
class ConfidenceSettings:
    """Stop rule of a model that drafts token by token."""

    stop: Literal["none", "entropy", "product", "acceptance"] = setting(
        "none", "stop drafting early: none, entropy, product or acceptance (a trained head)"
    )
    stop_below: float = setting(0.3, "threshold of the stop rule", at_least=0, at_most=1)
    entropy_weight: float = setting(
        0.2, "entropy: weight of the entropy (nats) in the bound", above=0
    )
    acceptance_head: str = setting(
        "", "acceptance: folder of the head (outrider train acceptance makes one)"
    )

    def __post_init__(self) -> None:
        if (self.stop == "acceptance") != bool(self.acceptance_head):
            raise ConfigError(
                "stop=acceptance and acceptance_head=FOLDER go together; give both or neither"
            )


class StopRule:
    """The rule at work on one draft of B rows. `going` (B,) bool: rows that are still drafting."""

    def __init__(
        self,
        settings: ConfidenceSettings,
        num_rows: int,
        device: torch.device,
        predict: Predict | None = None,
        *,
        pending: Tensor | None = None,
        ends: Sequence[Collection[int]] = (),
    ) -> None:
        """`predict`: the trained head, for the rule that has one; it also reads `pending` (B,)
        int64, the tokens that the drafts go after. `ends`: per row, the tokens that end its text.
        """
        assert predict is None or pending is not None, "a trained head reads the token before"
        self._settings = settings
        self._predict = predict
        self._ends = ends
        self._previous = (
            torch.zeros(num_rows, dtype=torch.int64, device=device) if pending is None else pending
        )
        self._before: Tensor | None = None  # (B,) probability of the token before
        self._product = torch.ones(num_rows, device=device)
        self.going = torch.ones(num_rows, dtype=torch.bool, device=device)

    def before(self, law: Tensor) -> None:
        """Laws (B, V) that the next tokens would be drawn from."""
        if self._settings.stop == "entropy":
            self.going &= (
                acceptance_bound(law, self._settings.entropy_weight) >= self._settings.stop_below
            )
        elif self._settings.stop == "acceptance":
            assert self._predict is not None, "stop=acceptance without its head"
            self.going &= (
                self._product * self._predict(law, self._previous, self._before, None)
                >= self._settings.stop_below
            )

    def after(self, law: Tensor, token: Tensor) -> None:
        """Tokens (B,) that were drawn; `law` (B, V) as in `before`."""
        drawn = law.gather(1, token[:, None])[:, 0]
        if self._predict is not None:
            self._product *= self._predict(law, self._previous, self._before, token)
        self._previous = token
        self._before = drawn
        if self._settings.stop == "product":
            self._product *= drawn
            self.going &= self._product >= self._settings.stop_below
        if self._ends:
            over = [token_ in ends for token_, ends in zip(token.tolist(), self._ends, strict=True)]
            self.going &= ~torch.tensor(over, device=token.device)


def acceptance_bound(law: Tensor, weight: float) -> Tensor:
    """1 - sqrt(weight H(q)) of laws (..., V), H in nats, not below 0: (...)."""
    return (1 - (weight * torch.special.entr(law).sum(dim=-1)).sqrt()).clamp(min=0)
