"""Switches in the environment say one of their words, or what would have been right."""

from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.switches import switched

VARIABLE = "OUTRIDER_TRIED_HERE"


@pytest.mark.parametrize(("text", "expected"), [(None, "auto"), ("", "auto"), ("never", "never")])
def test_a_switch_has_a_word(
    text: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, text)
    assert switched(VARIABLE, ("auto", "never")) == expected


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nver")
    with pytest.raises(ConfigError) as refused:
        switched(VARIABLE, ("auto", "never"))
    assert str(refused.value) == (
        "OUTRIDER_TRIED_HERE says 'nver', which is none of its choices. "
        "Did you mean 'never'? Available: auto, never."
    )
