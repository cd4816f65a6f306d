"""The recorder: its notes are the generation, step by step, and the real control does not notice
it."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.lab.runner import Contender, Runner, Step, Trace
from outrider.llm import LLM
from outrider.sampling.params import SamplingParams
from tests.helpers import disturbed, save_checkpoint, tiny_llama, word_tokenizer

WORDS = 24
PROMPTS = [[3, 5, 7], [4, 4, 9, 2], [11]]
CHAIN = Configuration.parse("draft-model k=4")
TREE = Configuration.parse("draft-model k=6 tree=2x2")
COPIES = Configuration.parse("ngram k=3")
AUTO = Configuration.parse("draft-model k=auto:5")
PLAIN = Configuration()
ALL = [PLAIN, CHAIN, TREE, COPIES, AUTO]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A random target and a draft that is right now and then."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_llama(WORDS, sharpness=4.0)
    for name, model in (("target", target), ("draft", disturbed(target, 0.3))):
        save_checkpoint(folder / name, model, word_tokenizer(WORDS))
    options = Options(
        str(folder / "target"), draft=str(folder / "draft"), dtype="float32", threads=1
    )
    return Runner(options, ALL)


def traces(
    runner: Runner, configuration: Configuration, batch_size: int = 2, **params: Any
) -> list[Trace]:
    settings = [
        SamplingParams(max_tokens=20, seed=number, **params) for number in range(len(PROMPTS))
    ]
    return runner.open(configuration).run(PROMPTS, settings, batch_size)


def depth_of(step: Step, node: int) -> int:
    parent = node - 1 if step.parents is None else step.parents[node]
    return 1 if parent < 0 else depth_of(step, parent) + 1


@pytest.mark.parametrize("configuration", ALL, ids=lambda one: one.label)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_notes_spell_out_the_text(
    runner: Runner, configuration: Configuration, temperature: float
) -> None:
    """Kept nodes and the added token of all steps, cut where the row ended, are the output."""
    for trace in traces(runner, configuration, temperature=temperature):
        text: list[int] = []
        for step in trace.steps:
            assert step.start == len(text)
            news = [*(step.tokens[node] for node in step.path), step.next_token]
            assert 1 <= step.taken <= len(news)
            text += news[: step.taken]
        assert text == trace.completion.token_ids
        assert all(step.taken == len(step.path) + 1 for step in trace.steps[:-1])


@pytest.mark.parametrize("configuration", ALL, ids=lambda one: one.label)
def test_notes_add_up_to_the_counters(runner: Runner, configuration: Configuration) -> None:
    for trace in traces(runner, configuration):
        stats = trace.stats
        steps = trace.steps
        assert stats.steps == len(steps)
        assert stats.emitted == sum(step.taken for step in steps)
        assert stats.drafted == sum(len(step.tokens) for step in steps)
        assert stats.accepted == sum(min(len(step.path), step.taken) for step in steps)
        rejections = sum(not step.complete and step.taken > len(step.path) for step in steps)
        assert stats.tested == stats.accepted + rejections


def test_a_path_follows_its_parents(runner: Runner) -> None:
    steps = [step for trace in traces(runner, TREE) for step in trace.steps if step.tokens]
    assert any(len(step.path) > 1 for step in steps), "nothing was kept, so nothing is tested"
    for step in steps:
        assert step.parents is not None
        assert len(step.parents) == len(step.tokens) <= step.asked
        assert [depth_of(step, node) for node in step.path] == list(range(1, len(step.path) + 1))
        for before, node in zip([-1, *step.path], step.path, strict=False):
            assert step.parents[node] == before
        leaf = step.path[-1] if step.path else -1
        assert step.complete == (leaf not in step.parents)


def test_chains_have_no_parents_and_drawn_nodes_are_marked(runner: Runner) -> None:
    sampled = [
        step
        for trace in traces(runner, CHAIN, temperature=1.0)
        for step in trace.steps
        if step.tokens
    ]
    copied = [step for trace in traces(runner, COPIES) for step in trace.steps]
    assert all(step.parents is None for step in [*sampled, *copied])
    assert all(step.sampled == [True] * len(step.tokens) for step in sampled)
    assert all(step.sampled is None for step in copied)
    assert all(step.path == list(range(len(step.path))) for step in sampled)


def test_times_run_forward_and_rows_share_steps(runner: Runner) -> None:
    found = traces(runner, CHAIN, batch_size=3)
    for trace in found:
        ends = [trace.began_s, *(step.at_s for step in trace.steps)]
        assert all(
            after - before >= step.seconds > 0
            for before, after, step in zip(ends, ends[1:], trace.steps, strict=False)
        )
    by_end: dict[float, list[Step]] = {}
    for trace in found:
        for step in trace.steps:
            by_end.setdefault(step.at_s, []).append(step)
    assert all(step.rows == len(mine) for mine in by_end.values() for step in mine)
    assert max(map(len, by_end.values())) == 3


def test_clear_forgets(runner: Runner) -> None:
    contender = runner.open(CHAIN)
    contender.run(PROMPTS[:1], SamplingParams(max_tokens=6))
    first = contender.recorder.steps
    contender.run(PROMPTS[:1], SamplingParams(max_tokens=9))
    assert list(first) == [0]
    assert sum(step.taken for step in first[0]) == 6
    assert sum(step.taken for step in contender.recorder.steps[0]) == 9


def test_what_the_control_asks_for_and_learns_is_what_it_would_alone(runner: Runner) -> None:
    """The text and the lengths are those of an LLM without a recorder."""
    contender: Contender = runner.open(CHAIN)
    (trace,) = contender.run(PROMPTS[:1], SamplingParams(max_tokens=20))
    built = runner.open(CHAIN).built
    built.decoder.observers.clear()
    (alone,) = LLM.around(built).generate(PROMPTS[:1], SamplingParams(max_tokens=20))
    assert trace.completion.token_ids == alone.token_ids
    assert trace.completion.origins == alone.origins
    assert trace.steps[0].asked == 4
    assert contender.built.decoder.control.summary() == {"fixed": 4}
    auto = runner.open(AUTO)
    found = auto.run(PROMPTS, SamplingParams(max_tokens=20))
    assert sum(auto.built.decoder.control.summary()["chosen"].values()) == len(
        {step.at_s for trace in found for step in trace.steps}
    )
