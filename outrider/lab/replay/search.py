"""Better options for a model-free drafter, from logged texts: a search that does not believe its own best number.

docs/algorithms/replay.md, "Search". What changes memory, files or other requests is not searched (`max_tokens`, `cache`,
`max_entries`, `corpus`, ...).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from outrider.drafters.composite import CompositeDrafter
from outrider.drafters.lookup.suffix_array import DEPTH
from outrider.errors import ConfigError, OutriderError, did_you_mean
from outrider.lab.configuration import Configuration
from outrider.lab.intervals import ratio_of_rates
from outrider.lab.predict import StepCosts
from outrider.lab.progress import QUIET, Progress
from outrider.lab.replay.replay import Replay, replay, replayable_parts
from outrider.lab.replay.replay_result import SearchOutcome
from outrider.lab.replay.summary import MIN_BLOCKS, plain_steps, summarise
from outrider.lab.replay.texts import Text
from outrider.lab.result import Interval
from outrider.models.loaded import LoadedModel
from outrider.parts import Parts

MIN_TEXTS = 4
Sums = tuple[Sequence[float], Sequence[float]]  # numerators and denominators, one of each per text
LENGTH = "k"  # the name of the draft length among the options
Space = Mapping[str, BaseDistribution]
LENGTHS = IntDistribution(1, 24, log=True)


@dataclass(frozen=True)
class Found:
    """`configuration` is the best on the texts searched on; `outcome` says what it is worth."""

    configuration: Configuration
    outcome: SearchOutcome


def search(
    texts: Sequence[Text], configuration: Configuration, *, trials: int, seed: int = 0, space: Space | None = None,
    costs: StepCosts | None = None, target: LoadedModel | None = None, max_num_seqs: int = 1,
    progress: Progress = QUIET,
) -> Found:  # fmt: skip
    """`space`: option -> range; default: all options of the drafter that `configuration` does not set. `costs`: of
    steps with `max_num_seqs` rows.

    Raises ConfigError for too few texts, nothing to search, or a drafter without a known space, CapabilityError for what
    cannot be replayed.
    """
    replayable_parts(configuration)
    chosen = space_of(configuration, lengths=costs is not None) if space is None else space
    start = values_of(configuration, chosen)
    check_texts(len(texts))
    check_search(trials, chosen)
    train, held_out = split_texts(texts, seed)

    def run(options: Configuration, some: Sequence[Text]) -> Replay:
        return replay(some, options, target=target, max_num_seqs=max_num_seqs)

    tried: dict[str, float] = {}  # label -> objective

    progress.stage(f"search {configuration.label}", trials)
    study = _study(seed)
    study.enqueue_trial(start)
    for _ in range(trials):
        trial = study.ask(dict(chosen))
        options = with_values(configuration, {name: _readable(value) for name, value in trial.params.items()})
        progress.advance()
        if not _is_possible(options):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        if options.label not in tried:
            tried[options.label] = score(run(options, train), costs)
        trial.set_user_attr("options", options.as_dict())
        study.tell(trial, tried[options.label])
    best = Configuration(**study.best_trial.user_attrs["options"])
    before, after = run(configuration, held_out), run(best, held_out)
    outcome = SearchOutcome(
        objective="tau" if costs is None else "speedup",
        space=in_words(chosen),
        num_trials=trials,
        num_train=len(train),
        num_held_out=len(held_out),
        train_start=study.trials[0].value,
        train_best=study.best_value,
        start=summarise(before, held_out, costs),
        best=summarise(after, held_out, costs),
        gain=gain_interval(_sums(after, costs), _sums(before, costs)),
    )
    return Found(best, outcome)


def check_texts(num_texts: int) -> None:
    """Raises ConfigError for too few."""
    if num_texts < MIN_TEXTS:
        raise ConfigError(
            f"a search needs {MIN_TEXTS} texts at least, got {num_texts}: half of them are kept back, to see what the best "
            "settings are worth on texts they were not chosen on"
        )


def check_search(trials: int, space: Space) -> None:
    """Raises ConfigError where nothing could be found."""
    if trials < 2:
        raise ConfigError(f"a search needs 2 trials at least, the first being the configuration as it is; got {trials}")
    if not space:
        raise ConfigError("there is nothing to search: every option is set")


def score(found: Replay, costs: StepCosts | None) -> float:
    """The objective: tau, or with costs the predicted speedup."""
    emitted, paid = _sums(found, costs)
    return sum(emitted) / sum(paid)


def split_texts(texts: Sequence[Text], seed: int) -> tuple[list[Text], list[Text]]:
    """Two halves with the same mix of tasks, each in the order of the log; of an odd number the first gets one more."""
    by_task: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        by_task.setdefault(text.task, []).append(number)
    dealer = random.Random(seed)
    dealt: list[int] = []
    for numbers in by_task.values():
        dealer.shuffle(numbers)
        dealt += numbers
    train, held_out = sorted(dealt[::2]), sorted(dealt[1::2])
    return [texts[number] for number in train], [texts[number] for number in held_out]


def _sums(found: Replay, costs: StepCosts | None) -> Sums:
    """Sums of each text, in the order of the replay: tokens, and what was paid for them (in steps, or plain steps with
    costs)."""
    texts = found.texts
    paid = [float(text.stats.steps) if costs is None else plain_steps(text, costs) for text in texts]
    return [float(text.stats.emitted) for text in texts], paid


def gain_interval(new: Sums, old: Sums) -> Interval | None:
    """Ratio of `new` over the ratio of `old`, less 1; both over the same texts. None for too few of them."""
    if len(new[0]) < MIN_BLOCKS:
        return None
    found = ratio_of_rates(*new, *old)
    return found.model_copy(update={"value": found.value - 1, "low": found.low - 1, "high": found.high - 1})


def _study(seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # we show our own progress
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))


def _readable(value: Any) -> Any:
    """Three digits of a fraction: what a person can read, and finer than texts can tell."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _is_possible(options: Configuration) -> bool:
    """Values can each be right and not fit together, like min_ngram above max_ngram."""
    try:
        options.parts()
    except OutriderError:
        return False
    return True


def one_of(*values: Any) -> CategoricalDistribution:
    return CategoricalDistribution(values)


SPACES: dict[str, Space] = {
    "ngram": {
        "min_ngram": IntDistribution(1, 4), "max_ngram": IntDistribution(1, 8), "recency": FloatDistribution(0.0, 1.0),
        "min_share": FloatDistribution(0.0, 0.6), "tree": one_of(False, 2, 4, 8),
    },
    "suffix": {
        "max_depth": IntDistribution(8, 128, log=True), "alpha": FloatDistribution(0.0, 8.0),
        "beta": FloatDistribution(0.0, 8.0), "min_probability": FloatDistribution(0.0, 0.6),
        "discount": FloatDistribution(0.0, 1.0), "tree": one_of(False, True),
    },
    "ngram-cache": {
        "min_ngram": IntDistribution(1, 4), "max_ngram": IntDistribution(1, 8), "branches": IntDistribution(1, 4),
        "min_probability": FloatDistribution(0.0, 0.6), "learn_prompts": one_of(True, False),
    },
    "retrieval": {
        "max_match": IntDistribution(2, DEPTH), "min_match": IntDistribution(1, 8), "branches": IntDistribution(1, 8),
        "min_share": FloatDistribution(0.0, 0.6), "max_occurrences": IntDistribution(16, 1024, log=True),
    },
}  # fmt: skip


def in_words(space: Space) -> dict[str, str]:
    """Option -> range, for a person."""
    return {name: _in_words(one) for name, one in space.items()}


def _in_words(one: Any) -> str:
    return (
        ", ".join(map(str, one.choices)) if isinstance(one, CategoricalDistribution) else f"{one.low:g} to {one.high:g}"
    )


def space_of(configuration: Configuration, *, lengths: bool) -> dict[str, BaseDistribution]:
    """What may be tried around a configuration: options that it does not set. `lengths`: and the draft length.

    A composite's parts have theirs as PART.NAME. Raises ConfigError for a drafter without a known space.
    """
    parts = configuration.parts()
    if issubclass(parts.drafter, CompositeDrafter):
        whole: dict[str, BaseDistribution] = {"mode": one_of("merge", "best")}
        for part in parts.drafter.part_classes(parts.drafter_settings):
            whole |= {f"{part}.{name}": range_ for name, range_ in _known(part).items()}
    else:
        whole = dict(_known(configuration.drafter))
    if lengths:
        whole[LENGTH] = LENGTHS
    given = _given(configuration, parts)
    return {name: range_ for name, range_ in whole.items() if name not in given}


def values_of(configuration: Configuration, space: Space) -> dict[str, Any]:
    """What the configuration has now for everything in `space`. Raises ConfigError for names that are no options."""
    parts = configuration.parts()
    values: dict[str, Any] = {LENGTH: parts.length.max_nodes, **dataclasses.asdict(parts.drafter_settings)}
    if issubclass(parts.drafter, CompositeDrafter):
        for part, (_, settings) in parts.drafter.part_classes(parts.drafter_settings).items():
            values |= {f"{part}.{name}": value for name, value in dataclasses.asdict(settings).items()}
    for name in space:
        if name not in values:
            raise ConfigError(
                f"drafter '{configuration.drafter}' has no option '{name}' to search.{did_you_mean(name, values)}"
            )
    return {name: values[name] for name in space}


def with_values(configuration: Configuration, values: Mapping[str, Any]) -> Configuration:
    """The configuration with these values in place of its own."""
    options = dict(configuration.drafter_options)
    of_parts = dict(item.split("=", 1) for item in options.get("options", "").split(";") if item)
    for name, value in values.items():
        if "." in name:
            of_parts[name] = str(value)
        elif name != LENGTH:
            options[name] = value
    if of_parts:
        options["options"] = ";".join(f"{name}={value}" for name, value in of_parts.items())
    return replace(
        configuration, drafter_options=options, num_draft_tokens=values.get(LENGTH, configuration.num_draft_tokens)
    )


def _known(drafter: str) -> Space:
    if drafter not in SPACES:
        raise ConfigError(
            f"it is not known between which bounds the options of drafter '{drafter}' make sense; give search() a space. "
            f"Known: {', '.join(SPACES)}, and composites of these"
        )
    return SPACES[drafter]


def _given(configuration: Configuration, parts: Parts) -> set[str]:
    """Names that the user has set."""
    given = {name.replace("-", "_") for name in configuration.drafter_options}
    if configuration.num_draft_tokens is not None:
        given.add(LENGTH)
    if issubclass(parts.drafter, CompositeDrafter):
        for part, options in parts.drafter_settings.options_by_part().items():
            given |= {f"{part}.{name}" for name in options}
    return given
