"""docs/results/reasoning.md from the newest result of the study `worked-solutions`. No number is
typed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workload import RESULTS, console, read_result

from outrider.errors import ConfigError
from outrider.report.document import (
    Block,
    Bullets,
    CodeBlock,
    Column,
    Document,
    Heading,
    Paragraph,
    Table,
    Tone,
)
from outrider.report.markdown import to_markdown
from study.tables import lines_table
from study.worked import CHAIN, REASONS

FEW = 20  # tests, or steps, below which a kind is left out of sentences and curves
AGAIN = "python benchmarks/studies.py worked-solutions"
Study = dict[str, Any]


def render_worked(out: Path, folder: Path = RESULTS) -> None:
    """Write the page. Raises ConfigError where the study has no result."""
    files = sorted(folder.glob("studies-worked-solutions-2*.json*"))
    if not files:
        raise ConfigError(f"the study has no result yet; run '{AGAIN}'")
    out.write_text(page(read_result(files[-1]), files[-1].name), encoding="utf-8")
    console().print(f"written: {out}")


def page(content: dict[str, Any], source: str) -> str:
    """The page as Markdown."""
    studies = content["studies"]
    blocks: list[Block] = [Paragraph(*answer(studies[0]))]
    blocks += [Heading("How far drafts are kept"), *_kept(studies)]
    blocks += [
        Heading("Predicted and measured speedup by length"),
        *(part for one in studies for part in _lengths(one)),
    ]
    blocks += [Heading("Why drafts are rejected"), *map(_rejected, studies)]
    blocks += [
        Heading("What improves the draft"),
        *(part for one in studies for part in _ideas(one)),
    ]
    blocks += [*_same(studies), Heading("One solution by kind of step")]
    blocks += [
        Table((Column("kind", "left"), Column("text", "left")), content["example"]),
        *_method(content, source),
    ]
    title = (
        f"{content['target']}, {content['problems']} problems of the workload {content['workload']}"
    )
    return to_markdown(Document("Worked solutions", title, tuple(blocks)))


def answer(study: Study) -> tuple[str, Tone]:
    """The verdict in three sentences."""
    best = _chain(study, study["best"])
    if best is None:
        return f"{_label(study)}: the best draft length could not be measured.", "caution"
    known = [one for one in study["kinds"][1:] if one["tested"] >= FEW] or study["kinds"][:1]
    low = min(known, key=lambda one: one["alpha"][0])
    high = max(known, key=lambda one: one["alpha"][0])
    rejected = low["rejected"] / max(study["kinds"][0]["rejected"], 1)
    better = [one for one in _tried(study) if verdict(one, best) == "pays"]
    text = (
        f"At T = {study['temperature']:g}, {study['best']} draft tokens a step are "
        f"{_interval(best['speedup'], 'x')} as fast as "
        f"plain decoding. The target keeps {study['kinds'][0]['alpha'][0]:.0%} of the draft tokens that it tests: most in "
        f"{high['kind']} ({high['alpha'][0]:.0%}), fewest in {low['kind']} ({low['alpha'][0]:.0%}), with {rejected:.0%} of the "
        f"rejections. Of {len(_tried(study))} other ways to draft, {len(better) or 'none'} "
        f"{'is' if len(better) < 2 else 'are'} clearly faster."
    )
    return text, "good" if best["speedup"][1] > 1 else "bad" if best["speedup"][
        2
    ] < 1 else "caution"


def verdict(one: dict[str, Any], best: dict[str, Any]) -> str:
    """The comparison of two speedups over plain decoding, by their intervals."""
    if "speedup" not in one:
        return one["failure"]
    if one["speedup"][1] > best["speedup"][2]:
        return "pays"
    return "does not pay" if one["speedup"][2] < best["speedup"][1] else "no difference seen"


def _kept(studies: Sequence[Study]) -> Iterator[Block]:
    for study in studies:
        columns = (
            Column("kind of step", "left"),
            Column("tokens"),
            Column("α", help="draft tokens kept / tested, 95 % over problems"),
            Column(
                "overlap",
                help="mean over all tokens of sum min(p, q); greedy: of the distributions at "
                "temperature 1",
            ),
            Column(
                "kept",
                help="mean draft tokens kept by a step that begins in this kind: the sum of its "
                "survival",
            ),
        )
        rows = [
            [
                one["kind"],
                f"{one['tokens'] / study['tokens']:.0%}",
                _interval(one["alpha"]),
                f"{one['overlap']:.2f}",
                f"{sum(one['survival']):.1f}" if one["starts"] >= FEW else "-",
            ]
            for one in study["kinds"]
        ]
        yield Table(columns, rows, f"Draft tokens by kind of step, {_label(study)}")
    for study in studies:
        shown = [one for one in study["kinds"] if one["starts"] >= FEW]
        yield _by_position(
            "Survival by the kind that a step begins with",
            "P(at least so many are kept)",
            study,
            shown,
            "survival",
        )
    shown = [one for one in studies[0]["kinds"] if one["tested"] >= FEW]
    yield _by_position(
        "Kept where tested, by position in the draft",
        "kept / tested",
        studies[0],
        shown,
        "by_position",
    )


def _by_position(
    title: str, y: str, study: Study, shown: Sequence[dict[str, Any]], name: str
) -> Table:
    length = max((len(kind[name]) for kind in shown), default=0)
    lines = {kind["kind"]: kind[name] + [None] * (length - len(kind[name])) for kind in shown}
    positions = [float(n + 1) for n in range(length)]
    title = f"{title}, {_label(study)} ({y} over draft tokens)"
    return lines_table(title, "draft tokens", positions, lines)


def _lengths(study: Study) -> Iterator[Block]:
    columns = (
        Column("γ", help="draft tokens a step"),
        Column("τ, replay", help="tokens a step in a replay of the recorded texts"),
        Column(
            "one α",
            help=f"(1 - α^(γ+1)) / ((1 - α)(γc + 1)), c = {study['c']:.2f}: Leviathan et al. "
            "2211.17192",
        ),
        Column("replay", help="τ of the replay over the measured costs of steps and draft tokens"),
        Column(
            "measured",
            help="plain seconds / own seconds after the first step, over the same tokens; 95 % "
            "over problems",
        ),
    )
    rows = []
    errors = []
    for one in study["lengths"]:
        ran = _chain(study, one["num_draft_tokens"])
        forecasts = [one["alpha_speedup"], one["replay_speedup"]]
        if ran is not None:
            errors.append([abs(ran["speedup"][0] / forecast - 1) for forecast in forecasts])
        measured = "-" if ran is None else _interval(ran["speedup"], "x")
        shown = [f"{one['replay_tau']:.2f}", *(f"{forecast:.2f}x" for forecast in forecasts)]
        rows.append([str(one["num_draft_tokens"]), *shown, measured])
    marked = frozenset(
        n for n, one in enumerate(study["lengths"]) if one["num_draft_tokens"] == study["best"]
    )
    yield Table(columns, rows, f"Speedup by draft length, {_label(study)}", marked)
    alone, replayed = (max(found) for found in zip(*errors, strict=True))
    yield Paragraph(
        f"The replay puts the best length at γ = {study['best']}. At worst, of {len(errors)} "
        "lengths, the forecasts are off by "
        f"{alone:.0%} (one α) and {replayed:.0%} (replay)."
    )


def _rejected(study: Study) -> Table:
    greedy = study["temperature"] == 0
    why = study["kinds"][0]["why"]
    names = (
        [name for name in REASONS if name in why]
        if greedy
        else sorted(why, key=lambda name: -why[name])
    )
    columns = [
        Column("kind of step", "left"),
        Column("rejections"),
        *(Column(name if greedy else f"lost to {name}") for name in names),
        Column("commonest pairs", "left", "draft token → token of the text, and how often"),
    ]
    rows = [
        [
            one["kind"],
            str(one["rejected"]),
            *(f"{one['why'].get(name, 0):.0f}" for name in names),
            ", ".join(f"'{draft}' → '{text}' {count}x" for draft, text, count in one["pairs"]),
        ]
        for one in study["kinds"]
        if one["rejected"]
    ]
    return Table(
        columns,
        rows,
        f"{'Rejections by reason' if greedy else 'Tokens lost by cause'}, {_label(study)}",
    )


def _ideas(study: Study) -> Iterator[Block]:
    best = _chain(study, study["best"])
    if best is None:
        return
    columns = (
        Column("configuration", "left"),
        Column("what changes", "left"),
        Column("τ", help="tokens / target passes"),
        Column("drafted"),
        Column("speedup", help="over plain decoding"),
        Column("verdict", "left", "by whether the intervals of the speedups overlap"),
    )
    rows = [
        [one["configuration"], what, *(_numbers(one) if "speedup" in one else "---"), end]
        for one, what, end in [
            (best, "the chain to improve on", ""),
            *((one, one["what"], verdict(one, best)) for one in _tried(study)),
        ]
    ]
    yield Table(columns, rows, f"Other ways to draft, {_label(study)}")


def _numbers(one: dict[str, Any]) -> list[str]:
    return [f"{one['tau']:.2f}", f"{one['drafted']:.1f}", _interval(one["speedup"], "x")]


def _same(studies: Sequence[Study]) -> Iterator[Block]:
    ran = [one for study in studies for one in study["measured"] if one.get("same_texts")]
    apart = [one for one in ran if one["same_texts"][0] < one["same_texts"][1]]
    yield Heading("Same text")
    names = ", ".join(
        f"{one['configuration']} ({one['same_texts'][1] - one['same_texts'][0]})" for one in apart
    )
    if not apart:
        yield Paragraph(
            f"All greedy texts of {len(ran)} configurations are plain decoding's, token by token.",
            "good",
        )
    elif any(one["exact"] for one in apart):
        yield Paragraph(
            "Greedy texts that are not plain decoding's though exactness was promised, among: "
            f"{names}.",
            "bad",
        )
    else:
        yield Paragraph(
            "Greedy texts that differ from plain decoding's, of ways exact up to rounding: "
            f"{names}.",
            "caution",
        )


def _method(content: dict[str, Any], source: str) -> Iterator[Block]:
    yield Heading("Method and limits")
    busiest = max(one["other_cpu"] or 0.0 for one in content["studies"])
    yield Bullets(
        [
            "rules on the text decide the kinds (benchmarks/study/kinds.py); they see form, not meaning",
            "acceptance comes from one recording per temperature, with "
            f"{content['longest']} draft tokens a step; forecasts use it",
            "T = 1: texts differ between configurations by design, and so their speeds differ by text, too",
            f"other processes used up to {busiest:.0%} of the processors during a measured run",
            f"{source}: {content['date']}, outrider {content['versions']['outrider']}, {content['hardware']['cpu']}, "
            f"{content['hardware']['threads_used']} threads",
            *content.get("notes", []),
        ]
    )
    yield Paragraph("This command measures again and rewrites the page:")
    yield CodeBlock(AGAIN, "bash")


def _chain(study: Study, length: int) -> dict[str, Any] | None:
    wanted = f"{CHAIN} k={length}"
    return next(
        (one for one in study["measured"] if one["configuration"] == wanted and "speedup" in one),
        None,
    )


def _tried(study: Study) -> list[dict[str, Any]]:
    """The configurations that are no chains of a length."""
    own = [one for one in study["measured"] if not _is_length(one["configuration"])]
    return sorted(own, key=lambda one: -one["speedup"][0] if "speedup" in one else 0.0)


def _is_length(configuration: str) -> bool:
    return configuration.startswith(f"{CHAIN} k=") and configuration.count(" ") == 1


def _label(study: Study) -> str:
    return "greedy" if study["temperature"] == 0 else f"T = {study['temperature']:g}"


def _interval(found: Sequence[float] | None, unit: str = "") -> str:
    return "-" if found is None else f"{found[0]:.2f}{unit} [{found[1]:.2f}, {found[2]:.2f}]"
