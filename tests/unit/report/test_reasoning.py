"""What the page about worked solutions says, and that it follows the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outrider.lab.bench.result import Accuracy, Identity, Speedup, WorkloadInfo
from outrider.lab.explain.result import Confusion
from outrider.lab.reasoning.result import (
    Contestant,
    Example,
    KindAcceptance,
    KindRejections,
    LengthEstimate,
    ReasoningResult,
    TemperatureStudy,
)
from outrider.lab.result import Interval
from outrider.report.console import print_document
from outrider.report.document import Bullets, Code, Document, Heading, Paragraph, Plot, Table, TokenText
from outrider.report.html import to_html
from outrider.report.markdown import to_markdown
from outrider.report.reasoning import answer, document
from outrider.report.render import render

SPREAD = 0.1
FULL = (0.7, 0.5, 0.4)


def around(value: float, spread: float = SPREAD) -> Interval:
    return Interval(value=value, low=value - spread, high=value + spread)


def speed(value: float, spread: float = SPREAD) -> Speedup:
    return Speedup(value=value, interval=around(value, spread), num_prompts=20)


def kind(name: str, alpha: float, tested: int = 100, survival: Sequence[float] = FULL, positions: Any = None) -> KindAcceptance:
    return KindAcceptance(
        kind=name, tokens=tested, tested=tested, kept=int(alpha * tested), alpha=around(alpha, 0.04), overlap=alpha,
        starts=tested, survival=[around(value, 0.05) for value in survival], by_position=positions or [0.7, 0.75, 0.8, 0.9],
    )  # fmt: skip


def reject(name: str, count: int, *, greedy: bool = True) -> KindRejections:
    reasons = {"near tie": count // 2, "second guess": count // 4, "doubt": 0, "sure": count - count // 2 - count // 4}
    return KindRejections(
        kind=name, count=count, reasons=reasons if greedy else {}, lost={"draft": 3.0 * count, "luck": -7.0},
        confusions=[Confusion(draft="|", text="0", count=3)], target_entropy=3.0, draft_entropy=2.5, target_entropy_kept=1.0,
        draft_entropy_kept=0.9,
    )  # fmt: skip


def lengths(best: float = 1.8) -> list[LengthEstimate]:
    found = []
    for gamma in range(4):
        replay = 1 + (best - 1) * gamma / 3
        found.append(
            LengthEstimate(
                num_draft_tokens=gamma, step_s=0.002 * (1 + 0.2 * gamma), alpha_tau=1 + gamma * 0.7, alpha_speedup=1.3 * replay,
                survival_tau=1 + gamma * 0.6, survival_speedup=0.9 * replay, replay_tau=1 + gamma * 0.65, replay_speedup=replay,
            )
        )  # fmt: skip
    return found


def chain(gamma: int | str, value: float = 1.7, **more: Any) -> Contestant:
    fixed = gamma if isinstance(gamma, int) else None
    given: dict[str, Any] = {
        "configuration": f"draft-model k={gamma}", "role": "length", "num_draft_tokens": fixed, "num_problems": 20,
        "tau": around(2.9), "alpha": 0.8, "drafted": 3.0, "tokens_per_s": 600.0, "speedup": speed(value), **SAME, **more,
    }  # fmt: skip
    return Contestant(**given)


def idea(name: str, over: float, tau: float = 3.5, **more: Any) -> Contestant:
    given = {"configuration": name, "role": "idea", "what": "a change", "over_best": speed(over, 0.05), "tau": around(tau)} | more
    return chain(5, **given)


SAME = {
    "identity": Identity(num_compared=20, num_identical=20),
    "accuracy": Accuracy(
        num_graded=18, num_incomplete=2, num_right=9, num_plain_right=9, num_only_own_right=0, num_only_plain_right=0
    ),
}


def study(temperature: float = 0.0, **more: Any) -> TemperatureStudy:
    greedy = temperature == 0
    given: dict[str, Any] = {
        "temperature": temperature, "texts": 20, "unfinished": 2, "tokens": 300, "steps": 90,
        "kinds": [kind("all", 0.8, 300), kind("decomposition", 0.65), kind("arithmetic", 0.9), kind("conclusion", 0.95, 8)],
        "rejections": [reject("all", 60, greedy=greedy), reject("decomposition", 40, greedy=greedy)], "c": 0.12,
        "estimates": lengths(), "best": 3, "tried": 3,
        "contestants": [chain(2, 1.5), chain(3), chain("auto:3", 1.6), idea("suffix k=8", 0.7), idea("tree k=7", 1.2)],
        "rounds": 1, "ended_by": "rounds", "other_cpu": 0.02,
    }  # fmt: skip
    return TemperatureStudy(**(given | more))


def result(*studies: TemperatureStudy, **more: Any) -> ReasoningResult:
    given: dict[str, Any] = {
        "target": "pair/target", "draft": "pair/draft", "workload": WorkloadInfo(name="gsm8k", notes=["gsm8k: a note"]),
        "problems": 20, "max_new_tokens": 128, "longest": 3, "runtime": "native", "dtype": "bfloat16", "device": "cpu",
        "threads": 2,
        "studies": list(studies) or [study(), study(1.0)], "seconds": 200.0, "command": "outrider reasoning pair",
        "example": Example(
            id="q1", prompt="Question: 2+2?\nAnswer:", pieces=[" It", " is", " 2+2", "=4", "\n#### 4", ""],
            fates=["correction", "accepted", "accepted", "bonus", "plain", "accepted"],
            kinds=["decomposition", "decomposition", "arithmetic", "arithmetic", "conclusion", "conclusion"],
            rejected=[" He", "", "", "", "", ""],
        ),
    }  # fmt: skip
    return ReasoningResult(**(given | more))


def blocks(found: Document, kind: type) -> list[Any]:
    return [block for block in found.blocks if isinstance(block, kind)]


def table(found: Document, title: str) -> Table:
    return next(block for block in blocks(found, Table) if block.title.startswith(title))


def paragraph_behind(found: Document, wanted: Any) -> str:
    place = list(found.blocks).index(wanted)
    following = found.blocks[place + 1]
    assert isinstance(following, Paragraph)
    return following.text


# ---------------------------------------------------------------- the answer


def test_three_sentences() -> None:
    text, tone = answer(result())
    assert tone == "good"
    assert text == (
        "Decoding greedily, 3 draft tokens a step solve 20 problems 1.70x [1.60, 1.80] as fast as plain decoding, with the same "
        "text token by token; 1.70x [1.60, 1.80] at T = 1 (k=3). The target keeps 80 % of the draft tokens that it gets to test, "
        "most in arithmetic (90 %), fewest in decomposition (65 %), where 67 % of the rejections are; in 50 % of all rejections "
        "the target itself was nearly undecided. Of 2 ideas for a better draft 1 surely beats that; the best is tree k=7 "
        "(a change), 1.20x [1.15, 1.25] its speed."
    )


@pytest.mark.parametrize(
    ("contestants", "best", "tone", "words"),
    [
        ([chain(3, 1.7)], 3, "good", ("Decoding greedily, 3 draft",)),
        ([chain(3, 1.05)], 3, "caution", ("1.05x [0.95, 1.15]",)),  # the interval reaches below 1
        ([chain(3, 0.8)], 3, "bad", ("Do not speculate here: decoding greedily",)),
        ([chain(3, 1.05)], 0, "bad", ("Do not speculate here",)),
        ([chain(3, failure="no", speedup=None)], 3, "caution", ("no draft length could be confirmed",)),
        ([chain(3), idea("a", 1.02), idea("b", 0.6)], 3, "good", ("None of 2 ideas", "closest is a (a change), 1.02x")),
        ([chain(3), idea("a", 1.1), idea("b", 1.3)], 3, "good", ("Of 2 ideas for a better draft 2 surely beat that",)),
        ([chain(3), idea("a", 1.1, failure="broken", over_best=None)], 3, "good", ("undecided.",)),  # no third sentence
        ([chain(3, identity=Identity(num_compared=20, num_identical=18))], 3, "good", ("with 18 of 20 texts the same",)),
    ],
)  # fmt: skip
def test_the_answer_follows_the_numbers(contestants: list[Contestant], best: int, tone: str, words: tuple[str, ...]) -> None:
    text, found = answer(result(study(contestants=contestants, best=best)))
    assert found == tone
    for word in words:
        assert word in text


def test_drawn_tokens_alone() -> None:
    text, _ = answer(result(study(1.0)))
    assert text.startswith("At T = 1, 3 draft tokens a step solve")
    assert "undecided" not in text


def test_few_tests_make_no_sentence() -> None:
    """The conclusion has 8 tests here: it is in the table, and never called the best."""
    text, _ = answer(result())
    assert "conclusion" not in text
    found = document(result())
    assert any(row[0] == "conclusion" for row in table(found, "Draft tokens by kind").rows)
    assert not any("conclusion" in series.label for plot in blocks(found, Plot) for series in plot.series)


# ---------------------------------------------------------------- the page


def test_every_picture_is_followed_by_what_it_says() -> None:
    found = render(result())
    for wanted in (*blocks(found, Plot), *blocks(found, Table)):
        if wanted.title.startswith(("Speedup by draft length", "The same solution")):
            continue  # its confirmation stands between; the last table speaks for itself
        assert paragraph_behind(found, wanted).endswith(".")


def test_kinds_that_surely_differ() -> None:
    found = document(result(study()))
    text = paragraph_behind(found, table(found, "Draft tokens by kind"))
    assert text.startswith("Greedy, α is 0.90 in arithmetic and 0.65 in decomposition; intervals are apart for arithmetic over ")
    near = study(kinds=[kind("all", 0.8, 300), kind("decomposition", 0.82), kind("arithmetic", 0.84)])
    found = document(result(near))
    assert paragraph_behind(found, table(found, "Draft tokens by kind")).endswith("all intervals overlap.")


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ([0.7, 0.75, 0.8, 0.9], "one α for all positions draws a wrong curve"),
        ([0.9, 0.8, 0.75, 0.7], "the draft drifts off"),
        ([0.8, 0.7, 0.9, 0.81], "hardly depends on the position"),
        ([None, None, None, None], "Too few drafts"),
    ],
)
def test_positions(positions: list[float | None], words: str) -> None:
    found = document(result(study(kinds=[kind("all", 0.8, 300, positions=positions)])))
    plot = next(block for block in blocks(found, Plot) if block.title.startswith("Kept where tested"))
    assert words in paragraph_behind(found, plot)


def test_survival_in_words() -> None:
    found = document(result(study(kinds=[kind("all", 0.8, 300), kind("arithmetic", 0.9, survival=(0.9, 0.8, 0.7)),
                                         kind("decomposition", 0.6, survival=(0.4, 0.2))])))  # fmt: skip
    plot = next(block for block in blocks(found, Plot) if block.title.startswith("Survival"))
    assert paragraph_behind(found, plot) == (
        "Half of all drafts live for 2 tokens or more, 40 % for 3; a step that begins in arithmetic keeps 2.4 draft tokens, one "
        "that begins in decomposition 0.6."
    )
    assert [series.y for series in plot.series][2] == [0.4, 0.2, None]
    dead = document(result(study(kinds=[kind("all", 0.3, survival=(0.3, 0.1))])))
    assert "Most drafts die at their first token, 10 % for 2." in to_markdown(dead)


def test_forecasts_and_the_clock() -> None:
    found = document(result(study()))
    confirmed = table(found, "Forecasts and the clock")
    by_name = {row[0]: row for row in confirmed.rows}
    assert by_name["draft-model k=3"][1:5] == ["1.70x [1.60, 1.80]", "0.73", "1.05", "0.94"]  # 1.7 / 2.34, / 1.62, / 1.8
    assert by_name["draft-model k=auto:3"][2:5] == ["-", "-", "-"]
    assert confirmed.marked == frozenset({1})
    assert paragraph_behind(found, confirmed) == (
        "The replay puts the best length at γ = 3 (1.80x), and so does the clock; at worst, of 2 lengths, the forecasts are off "
        "by: one α 27 %, survival 9 %, replay 6 %."
    )
    lengths_table = table(found, "Tokens a pass")
    assert [row[-1] for row in lengths_table.rows] == ["-", "-", "2.90", "2.90"]


def test_another_length_may_win() -> None:
    found = document(result(study(contestants=[chain(2, 1.9), chain(3, 1.7)])))
    assert "by the clock γ = 2 was the fastest of those that ran" in paragraph_behind(found, table(found, "Forecasts"))
    slow = document(result(study(best=0, contestants=[chain(3, 0.9)])))
    assert "By the replay no length is faster than plain decoding" in paragraph_behind(slow, table(slow, "Forecasts"))


def test_ideas_and_their_verdicts() -> None:
    ideas = [idea("good", 1.2), idea("dear", 0.7, tau=4.0), idea("cheap", 0.7, tau=1.2), idea("same", 1.0),
             idea("broken", 1.0, failure="it cannot", over_best=None, speedup=None)]  # fmt: skip
    found = document(result(study(contestants=[chain(3), *ideas])))
    rows = {row[0]: row for row in table(found, "Ideas").rows}
    verdicts = {name: rows[name][-1] for name in ("good", "dear", "cheap", "same", "broken")}
    assert verdicts == {
        "good": "pays", "dear": "does not pay", "cheap": "does not pay", "same": "no difference seen", "broken": "it cannot"
    }  # fmt: skip
    assert rows["draft-model k=3"][5] == "1"
    assert table(found, "Ideas").marked == frozenset({1})
    text = paragraph_behind(found, table(found, "Ideas"))
    assert text == (
        "Over draft-model k=3, good (1.20x [1.15, 1.25]) pays. 3 of 4 ideas keep more tokens a pass, but dear costs more than "
        "that brings."
    )


def test_rejections_and_causes() -> None:
    found = document(result())
    reasons = table(found, "Rejections by kind of step, greedy")
    assert list(reasons.rows[0]) == ["all", "60", "50 %", "25 %", "0 %", "25 %", "'|' → '0' 3x"]
    text = paragraph_behind(found, reasons)
    assert text.startswith("Of 60 rejections, in 50 % the target itself was nearly undecided (no draft could know) and in 25 %")
    assert text.endswith("has 3.00 nats of entropy (1.00 where one is kept), the draft's 2.50 (0.90).")
    causes = table(found, "Tokens lost")
    assert [column.heading for column in causes.columns][2:4] == ["lost to draft", "lost to luck"]
    assert "100 % of the tokens lost are lost to 'draft', most of them (67 %) in decomposition; coins and draws gave 7" in (
        paragraph_behind(found, causes)
    )


def test_nothing_rejected() -> None:
    nothing = KindRejections(
        kind="all", count=0, reasons=dict.fromkeys(("near tie", "second guess", "doubt", "sure"), 0), lost={}, confusions=[],
        target_entropy=None, draft_entropy=None, target_entropy_kept=1.0, draft_entropy_kept=1.0,
    )  # fmt: skip
    found = document(result(study(rejections=[nothing])))
    assert paragraph_behind(found, table(found, "Rejections")) == "Nothing was rejected."


@pytest.mark.parametrize(("exact", "tone"), [(True, "bad"), (False, "caution")])
def test_texts_that_differ(exact: bool, tone: str) -> None:
    """A configuration that promised the bits and broke them is an alarm."""
    parted = idea("tree", 1.0, exact=exact, identity=Identity(num_compared=20, num_identical=17))
    found = document(result(study(contestants=[chain(3), parted])))
    alarm = next(block for block in blocks(found, Paragraph) if block.text.startswith("3 of 40 greedy texts"))
    assert alarm.tone == tone
    assert "tree (3)" in alarm.text


def test_answers_that_differ() -> None:
    other = Accuracy(
        num_graded=18, num_incomplete=2, num_right=10, num_plain_right=9, num_only_own_right=1, num_only_plain_right=0
    )
    found = document(result(study(contestants=[chain(3), idea("a", 1.0, accuracy=other)])))
    assert any("9 of 18 finished answers right; 1 configuration gets others right" in p.text for p in blocks(found, Paragraph))
    same = document(result())
    assert any(p.text.endswith("right, and every configuration the same ones.") for p in blocks(same, Paragraph))


def test_the_example_keeps_every_token() -> None:
    found = document(result())
    tokens = blocks(found, TokenText)[0].tokens
    assert "".join(token.text for token in tokens) == "Question: 2+2?\nAnswer: It is 2+2=4\n#### 4"
    assert [token.rejected for token in tokens if token.rejected] == [" He"]
    rows = [list(row) for row in table(found, "The same solution").rows]
    assert rows == [["decomposition", "It is"], ["arithmetic", "2+2=4"], ["conclusion", "#### 4"]]
    assert not blocks(document(result(example=None)), TokenText)


def test_what_to_doubt() -> None:
    few = result(study(other_cpu=0.5, contestants=[chain(3, num_problems=7)]), problems=10)
    doubts = blocks(document(few), Bullets)[-1].items
    for words in ("2 of 20 texts were cut off after 128 tokens", "50 % of the processors", "10 problems are few", "gsm8k: a note",
                  "confirmed on 7 of 20 problems", "one loop of calls"):  # fmt: skip
        assert any(words in line for line in doubts), words
    calm = blocks(document(result()), Bullets)[-1].items
    assert not any("processors" in line or "are few" in line or "confirmed on" in line for line in calm)


def test_every_writer_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(result())
    text = to_markdown(found)
    assert text.startswith("# Worked solutions: gsm8k\n")
    assert blocks(found, Code)[0].text == "outrider reasoning pair"
    assert to_html(found).count("<svg") == len(blocks(found, Plot))
    print_document(found)
    assert "Worked solutions: gsm8k" in capsys.readouterr().out
    headings = [block.text for block in blocks(found, Heading)]
    assert headings == [
        "How far drafts are kept", "What each length should bring, and does", "Why drafts are rejected",
        "What improves the draft", "Same text, same answers", "One solution", "How it was measured, and what to doubt",
    ]  # fmt: skip
