"""docs/heads.md from the newest result of every study: what was reached, and what limits it. No number is typed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workload import RESULTS, console, read_result

from outrider.report.document import Block, Bullets, Code, Document, Heading, Paragraph
from outrider.report.markdown import to_markdown
from study.report_heads import before_after
from study.report_stop import acceptance
from study.tables import alpha, comparison, curves, pooled, sizes

INTRODUCTION = (
    "Trained heads and draft models, counted in tokens: tau = emitted tokens / target passes, the verifier's own token included; "
    "alpha = accepted / tested draft tokens, drafted = draft tokens / target passes. No clock is involved. Made by "
    "'python benchmarks/studies.py', one command a study; this page is written from 'benchmarks/results/studies-*.json' by "
    "'python benchmarks/studies.py render'. The samples are small (the sizes stand beside each table): differences of a few "
    "hundredths of alpha are noise."
)


def render(out: Path, folder: Path = RESULTS) -> None:
    """Write the page; studies without a result are named."""
    blocks: list[Block] = [Paragraph(INTRODUCTION)]
    for name, section in SECTIONS.items():
        files = sorted(folder.glob(f"studies-{name}-2*.json*"))
        if not files:
            blocks.append(Paragraph(f"Study '{name}' has no result yet.", "caution"))
            continue
        content = read_result(files[-1])
        blocks += section(content)
        blocks.append(Bullets(REMARKS[name]))
        versions = content["versions"]
        blocks.append(Paragraph(
            f"{files[-1].name}: outrider {versions['outrider']}, torch {versions['torch']}, {content['hardware']['cpu']}"
        ))  # fmt: skip
        blocks.append(Code(content["command"]))
    out.write_text(to_markdown(Document("Trained drafters: what training brings", "", tuple(blocks))), encoding="utf-8")
    console().print(f"written: {out}")


def _distil(content: dict[str, Any]) -> Iterator[Block]:
    yield Heading("Distilling a draft model")
    for name, one in content["beginnings"].items():
        labels = list(dict.fromkeys(row["label"] for row in one["measured"]))
        yield Heading(name, 3)
        yield Paragraph(f"{BEGINNINGS[name]} Prompts: {sizes(one['tasks'])}; {content['settings']['drafter']}.")
        yield comparison(one["measured"], labels, labels[0])
        lifts = []
        for temperature in (0.0, 1.0):
            old, new = (alpha(pooled(one["measured"], label=label, temperature=temperature)) for label in labels[:2])
            lifts.append((temperature, new / max(old, 1e-9) - 1))
        met = all(lift >= 0.1 for _, lift in lifts)
        said = " and ".join(f"{lift:+.2%} at T = {temperature:g}" for temperature, lift in lifts)
        verdict = "at least 10 % relative: met" if met else "below the 10 % of the floor"
        yield Paragraph(f"alpha over all tasks: {said}, {verdict}.", "good" if met else "bad")
        yield from curves(one["curves"])


def _domain(content: dict[str, Any]) -> Iterator[Block]:
    settings = content["settings"]
    yield Heading("One domain's answers")
    yield Paragraph(
        f"{settings['target']} and its own draft, distilled ({settings['epochs']} epochs) on the target's answers to "
        f"{settings['prompts_to_train_on']} prompts of GSM8K only, of Python files only, and of both. Measured on "
        f"{sizes(settings['tasks'])} that nobody trained on; {settings['drafter']}."
    )
    labels = list(dict.fromkeys(row["label"] for row in content["measured"]))
    yield comparison(content["measured"], labels, "before")
    yield from curves(content["curves"])


def _traffic(content: dict[str, Any]) -> Iterator[Block]:
    settings = content["settings"]
    yield Heading("Refreshed from traffic")
    yield Paragraph(
        f"{settings['requests']} completions (MATH problems, T = 0 and 1) recorded by 'outrider serve --log-requests', then "
        f"'outrider train draft-model --from-traffic LOG --set recorded_answers=true', {settings['epochs']} epochs. Measured on "
        f"{sizes(settings['tasks'])}: MATH problems that are not in the log, and GSM8K, which is other traffic."
    )
    yield comparison(content["measured"], ["before", "after"], "before")
    yield from curves(content["curves"])


REMARKS: dict[str, list[str]] = {  # what the numbers cannot say themselves; none is repeated here
    "before-after": [
        "An untrained head never guesses right, so a step is one token. Medusa begins as the target's own output layer "
        "one place too "
        "early, which is right where a token repeats.",
        "The heads were trained on answers to the demo's own problems only. On GSM8K questions, which are another "
        "language to them, "
        "they fall behind the draft model, whose recipe read GSM8K's training split: train on the traffic that will come.",
        "By region: before, nothing is kept anywhere; after, numbers and punctuation of worked steps gain most, words least.",
        "The embedded block head has since been trained on (outrider/demo/models/heads/README.md): on unseen demo problems, "
        "k = 7, its tau rose from 5.72 to 6.52, and it leads the demo's table. The numbers here are of the heads before.",
        "Limits: 14M parameters, 6000 answers, two or three epochs on one core; the learning curves have not flattened where a "
        "run's last epoch is its best.",
    ],
    "distil": [
        "'pair' is the case of practice: a draft that knows the domain, made to agree with its own target.",
        "'thinned' rises most because it begins with nothing; on texts unlike those it was trained on it may fall.",
        "'scratch': in a run as short as this one, both learn the frequent words first, and full laws bring no more "
        "than the text "
        "alone. The curves are far from flat; what they would reach was not measured.",
    ],
    "acceptance": [
        "At T = 1 a sampled row may be rejected anywhere, with a chance that the draft's law tells only in part: even the true "
        "chances (possible) save less than at T = 0, where every token is right or wrong.",
        "'possible' is a bound for any head that decides before it draws. Between it and 'saved' lies what the draft's "
        "law does not tell about the target's.",
        "The demo target's own problems leave little to save: its draft is nearly always right, so a fixed length drafts few "
        "tokens in vain but those behind the end of the text. What every rule saves there is mostly that end, and the trained "
        "head saves no more than the others; on GSM8K's questions, where the draft is often wrong, it saves by its estimates.",
        "'pair' was measured before rules stopped at the end of a text and before the head had its table of tokens.",
        "Which tokens these are (the head's table) adds little to what the law's shape tells: 'by laws alone' is a head without "
        "it, trained on the same texts.",
        "Sampled texts differ from length to length, so rows at T = 1 carry more noise than those at T = 0, where all lengths "
        "write the same texts; the worked-out numbers of the validation do not.",
        "'product' needs no training and is the rule to beat at T = 1: it too looks at the token that was drawn.",
        "The floor is one of T = 0. At T = 1 the worked-out saving is by token verification; the runs verify whole blocks, which "
        "gives long fixed drafts more than short ones. That this is what eats the saving is a guess: it was not measured apart.",
    ],
    "domain": [
        "What is learnt on one domain is lost in part on the other; both together keep both, at the price of as many more steps.",
    ],
    "from-traffic": ["A small log and few prompts. Questions of GSM8K are put in the same words, so they gain a little too."],
}
BEGINNINGS = {
    "thinned": "Two of the demo target's own layers, copied. before = those layers without any training.",
    "scratch": "Random weights of the embedded draft's shape, learnt from the same answers in as many steps: 'hard' from their "
    "text alone (cross entropy of the tokens), 'full' from the target's full laws.",
    "embedded": "The embedded draft. before = as it is shipped: the demo's recipe has distilled it already, for longer and on "
    "other texts, so there is little left to lift.",
    "pair": "The shared pair's own draft. before = trained on the same corpus as its target, never on the target's answers.",
}
SECTIONS: dict[str, Callable[[dict[str, Any]], Iterator[Block]]] = {
    "before-after": before_after, "distil": _distil, "acceptance": acceptance, "domain": _domain, "from-traffic": _traffic,
}  # fmt: skip
