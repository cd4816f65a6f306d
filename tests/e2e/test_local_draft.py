"""`--draft-endpoint local` with the real draft service: the demo's text, drafts that arrive, and no
process left behind."""

from __future__ import annotations

import psutil
import pytest

from outrider.llm import LLM
from outrider.remote.draft.text import DraftWait
from outrider.sampling.params import SamplingParams

PROMPT = "Tom has 3 apples and buys 4 more. How many"


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "suffix"])
def test_idle_cores_draft(monkeypatch: pytest.MonkeyPatch, draft: str | None) -> None:
    """A draft model, and a look-up drafter; greedy and invariant rows. Every step waits for its
    draft here."""
    monkeypatch.setattr(DraftWait, "budget_s", property(lambda self: 20.0))
    monkeypatch.setattr(
        DraftWait,
        "expects",
        lambda self, asked_s, silent_since_s, now_s, deadline_s: now_s < deadline_s,
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain = LLM("demo", drafter="none", threads=1).generate(PROMPT, params)[0]
    lines: list[str] = []
    with LLM("demo", draft=draft, draft_endpoint="local", threads=1, status=lines.append) as llm:
        for _ in range(2):  # a look-up drafter has the first answer to copy from
            done = llm.generate(PROMPT, params)[0]
            assert done.token_ids == plain.token_ids
        assert done.stats.accepted > 5
        assert (
            llm.drafter_counters["remote_draft_hits"] + llm.drafter_counters["remote_draft_waits"]
            > 0
        )
        assert not [name for name in llm.drafter_counters if "/" in name]
        sampled = llm.generate(
            PROMPT, SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
        )[0]
        assert len(sampled.token_ids) == 20
        children = [child for child in psutil.Process().children() if "service" in child.cmdline()]
        assert len(children) == 1
    assert "starting the draft service of this machine" in lines
    assert not children[0].is_running() or children[0].status() == psutil.STATUS_ZOMBIE
