"""Sequential temperature scaling: calibrated products."""

from __future__ import annotations

import pytest
import torch

from outrider.train.calibration import expected_calibration_error, sequential_temperatures


def test_overconfidence_is_found_position_by_position() -> None:
    """True chances are those of the logits divided by a temperature of each position's own: they
    are found."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20000, 3, generator=generator, dtype=torch.float64) * 2
    true = (2.0, 1.0, 0.5)
    accepted = torch.sigmoid(logits / torch.tensor(true, dtype=torch.float64))
    found = sequential_temperatures(logits, accepted, torch.ones(20000, 3, dtype=torch.bool))
    assert found.temperatures == pytest.approx(true, rel=0.08)
    assert found.error_after < 0.01 < found.error_before


def test_what_is_not_known_changes_nothing() -> None:
    logits = torch.zeros(4, 2)
    accepted = torch.full((4, 2), 0.5)
    counts = torch.tensor([[True, False]] * 4)
    found = sequential_temperatures(logits, accepted, counts)
    assert found.temperatures == (1.0, 1.0)
    assert found.error_after == pytest.approx(0.0)
    empty = sequential_temperatures(logits, accepted, torch.zeros(4, 2, dtype=torch.bool))
    assert empty.temperatures == (1.0, 1.0)


def test_the_error_by_hand() -> None:
    """Two bins: confidences 0.25 and 0.35 where 0.5 and 0.2 are true (one bin: gap 0.05 each), and
    0.9 where 0.7 is true."""
    estimated = torch.tensor([0.25, 0.35, 0.95])
    true = torch.tensor([0.5, 0.2, 0.7])
    assert expected_calibration_error(estimated, true) == pytest.approx((0.25 + 0.15 + 0.25) / 3)
    assert expected_calibration_error(
        torch.tensor([0.22, 0.28]), torch.tensor([0.32, 0.18])
    ) == pytest.approx(0.0, abs=1e-6)
