"""docs/results/heads.md from the newest result of every study: what was reached, and what limits
it. No number is typed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workload import RESULTS, console, read_result

from outrider.report.document import Block, Bullets, CodeBlock, Document, Heading, Paragraph
from outrider.report.markdown import to_markdown
from study.report_heads import before_after
from study.report_stop import acceptance
from study.tables import alpha, comparison, curves, pooled, sizes, tau

INTRODUCTION = (
    "What trained heads and draft models gain, counted in tokens, without a clock. tau = emitted tokens / target passes, the "
    "verifier's own token included. alpha = accepted / tested draft tokens. drafted = draft tokens / target passes. "
    "'python benchmarks/studies.py STUDY' measures, and 'python benchmarks/studies.py render' writes this page from "
    "'benchmarks/results/studies-*.json'. The samples are small (each table gives their size): differences of a few "
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
        blocks.append(
            Paragraph(
                f"{files[-1].name}: outrider {versions['outrider']}, torch {versions['torch']}, "
                f"{content['hardware']['cpu']}"
            )
        )
        blocks.append(CodeBlock(content["command"]))
    out.write_text(
        to_markdown(Document("What training a drafter gains", "", tuple(blocks))), encoding="utf-8"
    )
    console().print(f"written: {out}")


def _quick(content: dict[str, Any]) -> Iterator[Block]:
    yield Heading("A first head in minutes")
    run = content["curves"]["eagle3"]
    measured = content["measured"]
    before, after = (pooled(measured, label=label) for label in ("before", "after"))
    yield Paragraph(
        f"'outrider train eagle3 --quick --target demo': {run['num_train'] + run['num_held_out']} "
        f"answers of the demo, {content['settings']['epochs']} epochs. Greedy, on "
        f"{measured[0]['num_prompts']} held-out problems of the demo's own: tau {tau(before):.2f} "
        f"before and {tau(after):.2f} after training, alpha {alpha(before):.3f} and "
        f"{alpha(after):.3f}."
    )
    yield from curves(content["curves"])


def _distil(content: dict[str, Any]) -> Iterator[Block]:
    yield Heading("Distilling a draft model")
    for name, one in content["beginnings"].items():
        labels = list(dict.fromkeys(row["label"] for row in one["measured"]))
        yield Heading(name, 3)
        yield Paragraph(
            f"{BEGINNINGS[name]} Prompts: {sizes(one['tasks'])}; {content['settings']['drafter']}."
        )
        yield comparison(one["measured"], labels, labels[0])
        lifts = []
        for temperature in (0.0, 1.0):
            old, new = (
                alpha(pooled(one["measured"], label=label, temperature=temperature))
                for label in labels[:2]
            )
            lifts.append((temperature, new / max(old, 1e-9) - 1))
        met = all(lift >= 0.1 for _, lift in lifts)
        changes = " and ".join(f"{lift:+.2%} at T = {temperature:g}" for temperature, lift in lifts)
        verdict = "at least 10 % relative: met" if met else "below the 10 % of the floor"
        yield Paragraph(f"alpha over all tasks: {changes}, {verdict}.", "good" if met else "bad")
        yield from curves(one["curves"])


def _domain(content: dict[str, Any]) -> Iterator[Block]:
    settings = content["settings"]
    yield Heading("One domain's answers")
    yield Paragraph(
        f"{settings['target']} and its own draft, distilled ({settings['epochs']} epochs) on the "
        "target's answers to "
        f"{settings['prompts_to_train_on']} prompts of GSM8K only, of Python files only, and of "
        "both. Measured on "
        f"{sizes(settings['tasks'])} outside the training texts; {settings['drafter']}."
    )
    labels = list(dict.fromkeys(row["label"] for row in content["measured"]))
    yield comparison(content["measured"], labels, "before")
    yield from curves(content["curves"])


def _traffic(content: dict[str, Any]) -> Iterator[Block]:
    settings = content["settings"]
    yield Heading("Refreshed from traffic")
    yield Paragraph(
        f"{settings['requests']} completions (MATH problems, T = 0 and 1) recorded by 'outrider "
        "serve --log-requests', then "
        "'outrider train draft-model --from-traffic LOG --recorded-answers', "
        f"{settings['epochs']} epochs. Measured on "
        f"{sizes(settings['tasks'])}: MATH problems that are not in the log, and GSM8K, which is "
        "other traffic."
    )
    yield comparison(content["measured"], ["before", "after"], "before")
    yield from curves(content["curves"])


REMARKS: dict[str, list[str]] = {  # what the numbers do not show
    "before-after": [
        "An untrained head never guesses right, so a step emits one token. Medusa starts as the target's own output layer, one "
        "position too early. That is right where a token repeats.",
        "The heads were trained on answers to the demo's own problems only. GSM8K questions differ from those, and there the "
        "heads fall behind the draft model, whose recipe used GSM8K's training split. Train on the traffic that you expect.",
        "By region: before training nothing is kept anywhere. After it, numbers and punctuation of worked steps gain most, words "
        "least.",
        "The embedded block head has been trained further since (outrider/demo/models/heads/README.md). On unseen demo problems, "
        "k = 7, its tau rose from 5.72 to 6.52, and it leads the demo's table. The numbers here are of the earlier head.",
        "Limits: 14M parameters, 6000 answers, two or three epochs on one core. Where a run's last epoch is its best, the "
        "learning curve has not flattened.",
    ],
    "quick": [
        "To see every stage of a run before a long one: the learning curve is far from flat. 15 times the answers, above, bring "
        "the rest.",
    ],
    "distil": [
        "'pair' is the usual case: a draft that knows the domain learns to agree with its own target.",
        "'thinned' gains most because it starts with nothing. On texts unlike those it was trained on it may fall.",
        "'scratch': in such a short run both learn the frequent words first, and full distributions bring no more than the text "
        "alone. The curves are far from flat. A longer run was not measured.",
    ],
    "acceptance": [
        "At T = 1 a token may be rejected anywhere, and the draft's distribution shows only part of that chance. Even the true "
        "chances (possible) save less than at T = 0, where every token is right or wrong.",
        "'possible' is a bound for any head that decides before it draws. What lies between it and 'saved' is what the draft's "
        "distribution does not show about the target's.",
        "On the demo target's own problems there is little to save, because its draft is nearly always right. A fixed length "
        "wastes few tokens except those after the end of the text. Every rule saves mostly those, the trained head no "
        "more than the others. On GSM8K's questions, where the draft is often wrong, the head saves by its estimates.",
        "'pair' was measured before rules stopped at the end of a text and before the head had its table of tokens.",
        "The head's table of tokens adds little to the shape of the distribution. 'without token table' is a head that "
        "was trained on the same texts without it.",
        "Sampled texts differ from length to length, so rows at T = 1 are noisier than those at T = 0, where all lengths "
        "write the same texts. The computed numbers of the validation do not have this noise.",
        "'product' needs no training and is the rule to beat at T = 1, because it also looks at the token that was drawn.",
        "The floor holds at T = 0. At T = 1 the computed saving assumes token verification. The runs verify whole blocks, which "
        "favours long fixed drafts. Whether this explains the smaller saving was not measured.",
    ],
    "domain": [
        "Training on one domain loses part of the other. Both together keep both, for as many more steps.",
    ],
    "from-traffic": [
        "A small log and few prompts. Questions of GSM8K use similar words, so they gain a little, too."
    ],
}
BEGINNINGS = {
    "thinned": "Two of the demo target's own layers, copied. before = those layers without any training.",
    "scratch": "Random weights of the embedded draft's shape, trained on the same answers in as many steps. 'hard' learns from "
    "their text alone (cross entropy of the tokens), 'full' from the target's full distributions.",
    "embedded": "The embedded draft. before = as it is shipped: the demo's recipe has distilled it already, for longer and on "
    "other texts, so it can gain little.",
    "pair": "The shared pair's own draft. before = trained on the same corpus as its target, never on the target's answers.",
}
SECTIONS: dict[str, Callable[[dict[str, Any]], Iterator[Block]]] = {
    "before-after": before_after,
    "quick": _quick,
    "distil": _distil,
    "acceptance": acceptance,
    "domain": _domain,
    "from-traffic": _traffic,
}
