"""The search of options: what it may touch, what it finds, and that it is judged on other texts."""

from __future__ import annotations

import dataclasses

import pytest
from optuna.distributions import FloatDistribution, IntDistribution

from outrider.errors import CapabilityError, ConfigError
from outrider.lab.configuration import Configuration
from outrider.lab.predict import StepCosts
from outrider.lab.replay.replay import replay
from outrider.lab.replay.search import SPACES, one_of, search, space_of, split_texts, values_of, with_values
from outrider.lab.replay.texts import Text

STEEP = StepCosts.of_steps({0: 0.010, 1: 0.012, 8: 0.060})


def texts(count: int = 24) -> list[Text]:
    """Rare repetitions of one token, long ones of three: short matches mislead."""
    made = []
    for n in range(count):
        block = [100 + (n * 7 + index * (index + n)) % 60 for index in range(12)]
        noise = [7, 200 + n, 7, 300 + n, 7, 400 + n, 7, 500 + n]
        made.append(Text([1, *block, *noise], [*noise[::-1], 7, *block, 7, *block[:6]], task="ab"[n % 2], id=str(n)))
    return made


@pytest.mark.parametrize("name", SPACES)
def test_spaces_fit_their_drafters(name: str) -> None:
    """Catches a renamed option, and a default outside of its own range."""
    configuration = Configuration(name, drafter_options={"corpus": __file__} if name == "retrieval" else {})
    parts = configuration.parts()
    fields = {field.name for field in dataclasses.fields(parts.drafter.Settings)}
    assert set(SPACES[name]) <= fields
    for option, value in values_of(configuration, SPACES[name]).items():
        one = SPACES[name][option]
        assert one._contains(one.to_internal_repr(value))


def test_what_is_set_is_not_searched() -> None:
    """Catches a search that overrules the user, in composites, too."""
    assert "max_ngram" not in space_of(Configuration.parse("ngram max-ngram=3"), lengths=False)
    assert "k" not in space_of(Configuration.parse("ngram"), lengths=False)
    assert "k" in space_of(Configuration.parse("ngram"), lengths=True)
    assert "k" not in space_of(Configuration.parse("ngram k=4"), lengths=True)
    composite = Configuration.parse("composite parts=ngram+suffix mode=best options=suffix.alpha=2")
    space = space_of(composite, lengths=False)
    assert "ngram.min_share" in space
    assert not {"mode", "suffix.alpha", "parts", "options"} & set(space)


def test_values_reach_the_drafter() -> None:
    """Catches options that are named in the result and not used."""
    assert with_values(Configuration("suffix"), {"alpha": 2.5, "k": 3}).label == "suffix k=3 alpha=2.5"
    composite = Configuration.parse("composite parts=ngram+suffix options=suffix.alpha=2")
    tried = with_values(composite, {"mode": "best", "ngram.tree": False, "suffix.discount": 0.25})
    settings = tried.parts().drafter.part_classes(tried.parts().drafter_settings)  # type: ignore[attr-defined]
    assert (settings["suffix"][1].alpha, settings["suffix"][1].discount, settings["ngram"][1].tree) == (2.0, 0.25, False)
    assert tried.parts().drafter_settings.mode == "best"
    assert values_of(tried, {"suffix.discount": FloatDistribution(0, 1)}) == {"suffix.discount": 0.25}
    with pytest.raises(ConfigError, match="Did you mean 'discount'"):
        values_of(Configuration("suffix"), {"discont": FloatDistribution(0, 1)})


def test_halves_share_no_text_and_every_task() -> None:
    """Catches a text that is searched on and judged by, and a task that is in one half only."""
    many = texts(25)
    train, held_out = split_texts(many, seed=1)
    assert [len(train), len(held_out)] == [13, 12]
    assert {text.id for text in train}.isdisjoint(text.id for text in held_out)
    for half in (train, held_out):
        assert {text.task for text in half} == {"a", "b"}
        assert [int(text.id) for text in half] == sorted(int(text.id) for text in half)
    assert split_texts(many, seed=2)[0] != train
    assert split_texts(many, seed=1)[0] == train


def test_it_finds_what_is_better() -> None:
    """Catches a search that minimises, forgets its best trial, or reports the texts it searched on. Matches of one token
    mislead here: tau needs longer ones as well, and where drafting costs, only longer ones."""
    given = Configuration.parse("ngram k=4 min_ngram=1 max_ngram=1 recency=1 min_share=0")
    for option, costs in (("max_ngram", None), ("min_ngram", STEEP)):
        start = given if costs is None else with_values(given, {"max_ngram": 4})
        found = search(texts(), start, trials=6, seed=1, costs=costs, space={option: IntDistribution(1, 4)})
        outcome = found.outcome
        assert outcome.space == {option: "1 to 4"}
        assert found.configuration.drafter_options[option] > 1
        assert outcome.train_best > outcome.train_start
        assert outcome.gain is not None
        assert outcome.gain.low > 0
        assert outcome.best.overall.num_texts == outcome.num_held_out == 12
        assert outcome.best.configuration == found.configuration.label
        value, base = ((one.overall.speedup or one.overall.tau).value for one in (outcome.best, outcome.start))
        assert outcome.gain.value == pytest.approx(value / base - 1)
        assert outcome.objective == ("tau" if costs is None else "speedup")


def test_the_same_seed_finds_the_same() -> None:
    """Catches trials that depend on the clock or on an unseeded sampler."""
    runs = [search(texts(8), Configuration("suffix"), trials=5, seed=seed, costs=STEEP).configuration for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_lengths_are_searched_where_their_cost_is_known() -> None:
    """Catches a draft length chosen by tau alone: it would be the longest."""
    found = search(texts(8), Configuration.parse("suffix tree=false"), trials=12, seed=0, costs=STEEP)
    assert isinstance(found.configuration.num_draft_tokens, int)
    free = search(texts(8), Configuration("suffix"), trials=2, seed=0)
    assert free.configuration.num_draft_tokens is None


def test_values_that_do_not_fit_together_are_passed_over() -> None:
    """Catches a search that ends with the error of an impossible trial."""
    space = {"min_ngram": IntDistribution(1, 8), "max_ngram": IntDistribution(1, 8)}
    found = search(texts(6), Configuration("ngram"), trials=12, seed=0, space=space)
    options = found.configuration.drafter_options
    assert options["min_ngram"] <= options["max_ngram"]
    chains = Configuration.parse("ngram verifier=block")
    assert search(texts(6), chains, trials=4, space={"tree": one_of(False, 4)}).configuration.drafter_options["tree"] is False


@pytest.mark.parametrize(
    ("label", "count", "trials", "message"),
    [
        ("ngram", 3, 4, "4 texts at least"),
        ("ngram", 8, 1, "2 trials at least"),
        ("ngram min_ngram=1 max_ngram=2 recency=1 min_share=0 tree=2", 8, 4, "every option is set"),
        ("none", 8, 4, "not known between which bounds"),
    ],
)
def test_searches_that_cannot_be(label: str, count: int, trials: int, message: str) -> None:
    """Catches an error of the optimiser's, or a search that changes nothing."""
    with pytest.raises(ConfigError, match=message):
        search(texts(count), Configuration.parse(label), trials=trials)
    with pytest.raises(CapabilityError, match="needs more than text"):
        search(texts(8), Configuration("draft-model"), trials=4)


def test_a_searched_configuration_replays_the_same() -> None:
    """Catches a result whose label stands for other values than those that were judged."""
    found = search(texts(12), Configuration("suffix"), trials=6, seed=2)
    again = Configuration.parse(found.outcome.best.configuration)
    _, held_out = split_texts(texts(12), seed=2)
    assert replay(held_out, again).total.steps == found.outcome.best.overall.steps
