"""Both drafters keep the contract of every drafter, on a tiny model: texts are the target's, and rows
come and go. No checkout of Outrider is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_phrases import PhraseDrafter, PhraseSettings
from outrider_phrases.learned import LearnedPhraseDrafter, LearnedSettings

from outrider.testing import check_drafter

PROMPTS = ["abcab", "1, 2, 3, 1, 2, 3", "x"]


@pytest.mark.parametrize("tree", [False, True])
def test_phrases(tmp_path: Path, tree: bool) -> None:
    phrases = tmp_path / "phrases.txt"
    phrases.write_text("abcabcacb\nabbaacab\n1, 2, 3, 4\nx y z\n")
    check_drafter(PhraseDrafter, PhraseSettings(file=str(phrases), tree=tree), prompts=PROMPTS)


def test_learned_phrases() -> None:
    check_drafter(LearnedPhraseDrafter, LearnedSettings(context=2), prompts=PROMPTS)
