"""Drafts from a service, in reports of `estimate` and `tune`: a verdict, and what every draft length would bring."""

from __future__ import annotations

from outrider.lab.estimate.estimate_result import RemoteEstimate, RemoteLength
from outrider.report.document import Block, Bullets, Fact, Heading, Paragraph, Tone, table
from outrider.report.text import number, times

HARDLY = 1.05  # a predicted gain below this is within what such an estimate can be off


def remote(found: RemoteEstimate | None) -> list[Block]:
    """A verdict of their own, and all ways by length; nothing where no service was asked about."""
    if found is None:
        return []
    return [Heading("Drafts from a service"), Paragraph(*remote_verdict(found)), *remote_lengths(found)]


def remote_verdict(found: RemoteEstimate) -> tuple[str, Tone]:
    """One sentence about a draft service, and how it is meant."""
    both = f"{times(found.overlapped_speedup)} with drafts for outcomes, {times(found.synchronous_speedup)} without"
    both += f"; {times(found.co_located_speedup)} with the draft in the target's process"
    if not found.pays or not found.in_time:
        return f"do not have a service draft over this line: {both}", "bad"
    at = f"a service {_ms(found.rtt_s)} ms away, γ = {found.best_num_draft_tokens}: {both}"
    return (f"{at}. That is hardly a gain", "caution") if found.overlapped_speedup < HARDLY else (at, "good")


def remote_lengths(found: RemoteEstimate) -> list[Block]:
    """What the verdict on a draft service rests on."""
    lines = [f"hit rate h {number(found.hit_rate, 3)}{'' if found.hit_rate_given else ', which nobody gave: --set hit_rate'}"]
    edge = found.break_even_hit_rate
    lines.append("no hit rate is enough" if edge is None else f"break-even hit rate {number(edge, 3)} at the best length")
    if not found.in_time:
        lines.append("a reply takes longer than a plain step, and drafter 'remote' waits no longer than that: it decodes plainly")
    facts: list[Fact[RemoteLength]] = [
        Fact("γ", lambda one: str(one.num_draft_tokens)),
        Fact("target's step, ms", lambda one: _ms(one.target_s), "without drafting"),
        Fact("reply, ms", lambda one: _ms(one.reply_s), "round trip and drafting"),
        Fact(
            "synchronous", lambda one: times(one.synchronous_speedup),
            "τ · plain step / (target's step + reply): every step waits for its draft",
        ),
        Fact(
            "overlapped", lambda one: times(one.overlapped_speedup),
            "τ · plain step / (h max(target's step, reply) + (1 - h) (target's step + reply))",
        ),
        Fact(
            "co-located", lambda one: times(one.co_located_speedup),
            "τ · plain step / (target's step + drafting): in the target's process",
        ),
    ]  # fmt: skip
    title = f"Speedup with a round trip of {_ms(found.rtt_s)} ms"
    return [Bullets(lines), table(found.lengths, facts, title, frozenset({found.best_num_draft_tokens - 1}))]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
