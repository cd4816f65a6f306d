"""What `outrider export` wrote and found: the folder's `export.json`."""

from __future__ import annotations

from typing import Literal

from outrider.lab.result import Record, Result

FILE = "export.json"
WITHIN = 0.03  # by which tau may differ between two engines that run one head: rounding turns a few ties around


class Acceptance(Record):
    """What one engine counted over all prompts; every draft in full, also where it reaches beyond the answer's end."""

    drafts: int  # target passes that had a draft
    drafted: int  # draft tokens
    accepted: int
    accepted_per_position: list[int]  # [j]: drafts whose token j + 1 was accepted

    @property
    def tau(self) -> float:
        """1 + accepted / drafts."""
        return 1 + self.accepted / max(self.drafts, 1)

    @property
    def per_position(self) -> list[float]:
        """[j]: share of the drafts whose token j + 1 was accepted."""
        return [count / max(self.drafts, 1) for count in self.accepted_per_position]


class Compared(Record):
    """One drafter in two engines, on the same prompts and texts, greedily."""

    method: str  # vLLM's name for it
    num_draft_tokens: int
    num_prompts: int
    max_new_tokens: int
    dtype: str
    versions: dict[str, str]  # vllm and its torch
    outrider: Acceptance
    vllm: Acceptance
    departures: int  # how often our target chose another token than vLLM's; ours then went on along vLLM's text
    same_texts: int  # answers without a departure
    tau_ratio: float  # vLLM's tau / ours
    is_within: bool  # tau differs by at most WITHIN


class ExportResult(Result):
    kind: Literal["export"] = "export"
    drafter: str  # its kind
    layout: str
    source: str
    target: str
    checks: list[str]  # what --check found, one line each; empty without it
    compared: Compared | None = None
    not_compared: str = ""  # why `compared` is None
