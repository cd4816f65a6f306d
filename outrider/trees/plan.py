"""Which tree a row gets: from the user's words to a growth, by node budget and by whether its nodes
are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from outrider.errors import ConfigError
from outrider.sampling.params import SamplingParams
from outrider.settings import checked, setting
from outrider.trees.growth import BestFirstGrowth, Growth, ShapeGrowth
from outrider.trees.sequoia import sequoia_shape
from outrider.trees.shape import TreeShape, parse_widths
from outrider.trees.siblings import SiblingAcceptance
from outrider.trees.worth import NodeWorth, choices, draft_prob
from outrider.types import Draft, Verdict

KINDS = "chain, best-first, sequoia, parallel:3 or widths like 4x2x1"
# nodes of a tree whose size the user did not name: with the pending token, two tiles of 8 rows
DYNAMIC_NUM_NODES = 15
PARALLEL = "parallel"  # the kind of tree whose siblings are drawn with replacement
CHAIN_LENGTH = 4  # of each parallel chain, likewise


@checked()
@dataclass(frozen=True)
class TreeSettings:
    """How a draft model's guesses branch."""

    tree: str = setting("chain", KINDS)
    sample_from: float = setting(
        0.5, "temperature from which nodes are drawn instead of being the likeliest"
    )
    top_k: int = setting(
        4, "best-first: nodes expanded per level, and children of each", at_least=1
    )
    max_depth: int = setting(8, "best-first and sequoia: deepest level", at_least=1)
    min_gain: float = setting(
        0.15, "best-first: stop when a level adds fewer expected accepted tokens"
    )
    sibling_acceptance: str = setting(
        "0.7,0.12,0.05,0.03", "sequoia: P(the b-th child is the one kept), b = 1, 2, ..."
    )
    adapt: bool = setting(
        False,
        "best-first, sequoia: follow what is measured while running (drafts then depend on other "
        "texts)",
    )

    def __post_init__(self) -> None:
        kind, _, number = self.tree.partition(":")
        if kind == PARALLEL:
            if not number.isdigit() or int(number) < 1:
                raise ConfigError(
                    f"tree parallel:M needs the number of chains M >= 1, got '{self.tree}'"
                )
        elif self.tree not in ("chain", "best-first", "sequoia"):
            if not self.tree[:1].isdigit():
                raise ConfigError(f"tree must be {KINDS}; got '{self.tree}'")
            parse_widths(self.tree)
        self.acceptance()
        if self.adapt and self.tree not in ("best-first", "sequoia"):
            raise ConfigError(
                f"adapt plans shapes anew, which tree '{self.tree}' has none of; use sequoia or "
                "best-first"
            )

    def acceptance(self) -> tuple[float, ...]:
        """`sibling_acceptance` as numbers. Raises ConfigError."""
        try:
            values = tuple(float(part) for part in self.sibling_acceptance.split(","))
        except ValueError as error:
            raise ConfigError(
                f"sibling_acceptance must be numbers like 0.7,0.1; got '{self.sibling_acceptance}'"
            ) from error
        if not all(0 <= value <= 1 for value in values) or sum(values) > 1:
            raise ConfigError(
                "sibling_acceptance are probabilities with a sum of at most 1, got "
                f"{self.sibling_acceptance}"
            )
        return values

    def default_num_nodes(self) -> int:
        """Nodes of the tree when the user names no number."""
        kind, _, number = self.tree.partition(":")
        if kind == PARALLEL:
            return int(number) * CHAIN_LENGTH
        return (
            DYNAMIC_NUM_NODES
            if kind in ("best-first", "sequoia")
            else len(TreeShape.of_widths(parse_widths(kind)))
        )


class TreePlan:
    """The settings at work. `siblings`, and with `adapt` `worth`, count what is accepted; with
    `adapt` the shapes follow them."""

    def __init__(self, settings: TreeSettings) -> None:
        self.settings = settings
        self.kind, _, number = settings.tree.partition(":")
        self._num_chains = int(number or 0)
        self.siblings = SiblingAcceptance(settings.acceptance())
        self.worth = NodeWorth()
        self.replacement = self.kind == PARALLEL

    @property
    def grows_best_first(self) -> bool:
        """Whether nodes that are not drawn grow best-first by the draft's own probabilities alone."""
        return self.kind == "best-first" and not self.settings.adapt

    def samples(self, params: SamplingParams) -> bool:
        """Whether this row's nodes are drawn."""
        return not params.is_greedy and params.temperature >= self.settings.sample_from

    def growth(self, num_nodes: int, *, sampled: bool, prices: Sequence[float] = ()) -> Growth:
        """A tree of at most `num_nodes`. Drawn nodes always get a shape that is fixed beforehand;
        of others a best-first tree has those that are worth their `prices` (`paying`)."""
        if num_nodes and self.kind == "best-first" and not sampled:
            settings = self.settings
            worth = self.worth if settings.adapt else draft_prob
            return BestFirstGrowth(
                num_nodes, settings.top_k, settings.max_depth, settings.min_gain, worth, prices
            )
        return ShapeGrowth(self._shape(num_nodes))

    def observe(self, draft: Draft, verdict: Verdict, growths: Sequence[Growth] = ()) -> None:
        """Count which siblings were kept. `growths`: of every row, where its nodes came from."""
        self.siblings.count(draft, verdict)
        for index, growth in enumerate(growths if self.settings.adapt else ()):
            if isinstance(growth, BestFirstGrowth):
                path = verdict.lists.path[index][: verdict.lists.num_accepted[index]]
                self._weigh(growth, choices(draft.children[index], path))

    def _weigh(
        self, growth: BestFirstGrowth, chosen: list[tuple[Sequence[int], int | None]]
    ) -> None:
        nodes = growth.finish()  # the draft's, as the growth numbers them
        for siblings, num_kept in chosen:
            for node in siblings:
                self.worth.count(*growth.ranked_probs[nodes[node]], kept=node == num_kept)

    def _shape(self, num_nodes: int) -> TreeShape:
        if self.kind == PARALLEL:
            return TreeShape.parallel(self._num_chains, num_nodes)
        acceptance = self.siblings.estimate() if self.settings.adapt else self.settings.acceptance()
        if self.kind in ("best-first", "sequoia"):
            return _planned(acceptance, num_nodes, self.settings.max_depth)
        return _cut(self.kind, num_nodes, acceptance)


@lru_cache(maxsize=1024)
def _planned(acceptance: tuple[float, ...], num_nodes: int, max_depth: int) -> TreeShape:
    return sequoia_shape(acceptance, num_nodes, max_depth)


@lru_cache(maxsize=1024)
def _cut(widths: str, num_nodes: int, acceptance: tuple[float, ...]) -> TreeShape:
    return TreeShape.of_widths(parse_widths(widths)).best(
        num_nodes, tuple(sorted(acceptance, reverse=True))
    )
