"""What stopping early saves: by hand, and where a rule can save nothing."""

from __future__ import annotations

import pytest
import torch

from outrider.train.stopping import chains, saving


def test_by_hand() -> None:
    """Two positions, one where drafts live and one where they die: the second token of the first is
    worth more than the first of the second. Catches tokens counted per position instead of over
    all, and a tau without the verifier's own token."""
    true = torch.tensor([[0.9, 0.81], [0.1, 0.01]])
    found = saving(true, true, fixed=1)
    assert found.fixed_tau == pytest.approx(1 + (0.9 + 0.1) / 2)
    assert found.tau == pytest.approx(1 + (0.9 + 0.81) / 2)  # also two tokens
    assert found.survival == pytest.approx([0.45, 0.405])
    # 0.9 alone is less than 1.0: two tokens are needed, as many as the fixed length's
    assert found.saved == found.possible == 0
    assert saving(true, true, fixed=2).saved == pytest.approx(1 - 4 / 4)
    assert found.calibration == pytest.approx(0)


def test_a_head_that_says_the_same_everywhere_is_a_fixed_length() -> None:
    """Catches ties broken in favour of one position."""
    true = torch.rand(50, 6, generator=torch.Generator().manual_seed(0)).cumprod(1)
    estimated = torch.full((50, 6), 0.7).cumprod(1)
    found = saving(estimated, true, fixed=3)
    assert found.tau == pytest.approx(found.fixed_tau)
    assert found.saved == pytest.approx(0, abs=1 / 150)
    assert found.possible > 0.1


def test_order_alone_counts_and_knowing_nothing_costs() -> None:
    """Catches a saving that depends on calibration, which is reported apart."""
    generator = torch.Generator().manual_seed(1)
    true = torch.rand(200, 8, generator=generator).cumprod(1)
    assert saving(true**3, true, fixed=2).saved == pytest.approx(
        saving(true, true, fixed=2).possible
    )
    assert saving(true**3, true, fixed=2).calibration > 0.05
    noise = torch.rand(200, 8, generator=generator).cumprod(1)
    assert saving(noise, true, fixed=2).saved < 0


def test_chains_begin_at_every_position_that_has_room() -> None:
    """Catches products that begin with a later token's chance, and chains over the end of a text."""
    later = torch.tensor([[0.5, 0.25, 0.5, 0.0], [0.5, 0.5, 0.5, 0.5]])
    mask = torch.tensor([[True, True, True, False], [False, False, True, True]])
    found = chains((later + 0.25, later), (later + 0.5, later), mask, 2)
    # the first token: before its draw, then behind it
    assert found.tolist() == [[0.75, 0.25], [0.5, 0.375], [0.75, 0.5]]


def test_what_has_stopped_does_not_begin_again() -> None:
    """Catches tokens submitted behind one that was under the threshold."""
    estimated = torch.tensor([[0.2, 0.9], [0.5, 0.1]])
    true = torch.tensor([[0.5, 0.5], [0.5, 0.1]])
    found = saving(estimated, true, fixed=1)
    # of the second position the first, then the first of the other
    assert found.survival == [pytest.approx(0.5), 0.0]
