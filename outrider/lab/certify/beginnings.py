"""Whether two servers' sampled texts are alike: G-tests of homogeneity over how short texts begin,
and how they end.

The two servers draw as many texts for each prompt. Texts of one prompt are put into cells by their
first characters: a cell is split where the next character tells its texts apart, as long as the
parts are large enough; parts that are too small share one with their neighbours in the order of
characters. The other view reads texts from their end: a first token is drawn without drafts, and
where first tokens differ much the beginnings show little else. Only the texts of both servers
together decide on the cells, so texts of one distribution fail as seldom as stated. Tokens are not
needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from outrider.lab.certify.certify_result import GStatistic
from outrider.lab.certify.ranks import MIN_EXPECTED, noncentrality
from outrider.lab.certify.server_result import SampledView

MIN_SHARE = 1 / 8  # of a prompt's texts in one cell: with more cells a test finds less
Own = tuple[str, int]  # a text, and the number of its server
ENDED = ""  # the next "character" of a text that ends


@dataclass
class Stratum:
    """The texts of one prompt, drawn in one way."""

    plain: list[str] = field(default_factory=list)
    speculative: list[str] = field(default_factory=list)

    @property
    def num_draws(self) -> int:
        """Texts of each server."""
        return min(len(self.plain), len(self.speculative))

    def table(self, view: SampledView = "beginning") -> np.ndarray:
        """(2, cells): how many texts of each server begin, or end, as a cell says."""
        step = 1 if view == "beginning" else -1
        both = [(text[::step], 0) for text in self.plain]
        both += [(text[::step], 1) for text in self.speculative]
        least = max(least_of(len(self.plain), len(self.speculative)), MIN_SHARE * len(both))
        cells = list(_cells(both, least))
        return np.array([[[own for _, own in cell].count(i) for cell in cells] for i in (0, 1)])


def least_of(num_plain: int, num_speculative: int) -> float:
    """Texts that a cell needs so that MIN_EXPECTED are expected of either server."""
    fewer = min(num_plain, num_speculative)
    return MIN_EXPECTED * (num_plain + num_speculative) / fewer if fewer else float("inf")


def _cells(texts: list[Own], least: float) -> Iterator[list[Own]]:
    """`texts` in cells of at least `least` of them, or all in one."""
    nobody: list[Own] = []
    waiting = [(texts, 0, nobody)]  # a part, its common characters, and strays that go with it
    while waiting:
        cell, depth, strays = waiting.pop()
        parts: dict[str, list[Own]] = defaultdict(list)
        for text, own in cell:
            parts[text[depth : depth + 1] or ENDED].append((text, own))
        if len(parts) == 1 and ENDED not in parts:
            waiting.append((cell, depth + 1, strays))
            continue
        large = {char: part for char, part in parts.items() if len(part) >= least}
        rest = list(strays)
        groups = []
        for _, part in sorted(item for item in parts.items() if item[0] not in large):
            rest += part
            if len(rest) >= least:
                groups.append(rest)
                rest = []
        if groups or not large:
            groups = [*groups[:-1], [*(groups[-1] if groups else []), *rest]]
            rest = []
        yield from groups
        for char, part in sorted(large.items(), key=lambda item: (len(item[1]), item[0])):
            if char == ENDED:
                yield part + rest
            else:
                waiting.append((part, depth + 1, rest))
            rest = []


def homogeneity(strata: Sequence[Stratum], view: SampledView = "beginning") -> GStatistic:
    """One G-test over all strata: whether in each of them the two servers' texts have one
    distribution."""
    total_g = 0.0
    df = cells = num_uncertain = 0
    for stratum in strata:
        table = stratum.table(view)
        cells += table.shape[1]
        if table.shape[1] > 1:
            total_g += _g(table)
            df += table.shape[1] - 1
            num_uncertain += stratum.num_draws
    return GStatistic(
        num_draws=sum(stratum.num_draws for stratum in strata),
        num_uncertain=num_uncertain,
        num_cells=cells,
        g=total_g,
        df=df,
        p_value=float(stats.chi2.sf(total_g, df)) if df else 1.0,
        impossible=0,
    )


def _g(table: np.ndarray) -> float:
    """G of a (2, cells) table over Williams' factor."""
    rows, columns, total = table.sum(axis=1), table.sum(axis=0), table.sum()
    expected = np.outer(rows, columns) / total
    observed = table[table > 0]
    g = 2 * float((observed * np.log(observed / expected[table > 0])).sum())
    spread = (total * (1 / rows).sum() - 1) * (total * (1 / columns).sum() - 1)
    return g / (1 + spread / (6 * total * (table.shape[1] - 1)))


def detectable_between(statistic: GStatistic, level: float, power: float) -> float | None:
    """The smallest total variation between the servers that a test at `level` finds with
    probability `power`.

    It is averaged over the draws of prompts with more than one cell. With n draws of each, G is
    noncentral with at least 2 n TV² (Pinsker, from the mean of the two).
    None: there was no such prompt.
    """
    if not statistic.df:
        return None
    least = noncentrality(statistic.df, level, power) / (2 * statistic.num_uncertain)
    return min(1.0, float(np.sqrt(least)))
