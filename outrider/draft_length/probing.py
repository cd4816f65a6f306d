"""Steps taken to learn, not to earn: few, cheap, and rarer the less they teach.

While drafting pays, a plain step now and then keeps the baseline honest, but only where the baseline is close; and the next
larger size shows what it would cost and bring. While drafting does not pay, a try asks for one node in a few rows, up to twice
while it is kept; each try that changes nothing doubles the pause before the next one. Drafting begins again when what it has
promised since would have paid for its beginning. And when what is kept is no longer what was expected, the old knowledge is
doubted at once instead of fading slowly.
"""

from __future__ import annotations

from collections.abc import Sequence

CLOSE = 1.5  # plain steps are checked where drafting promises less than this many times their goodput
FIRST_CHECK, LAST_CHECK = 8, 200  # drafting steps between two plain ones: at first, and at most
FIRST_GROWTH, LAST_GROWTH = 5, 64  # steps between two larger drafts: at first, and at most
FIRST_PAUSE, LONGEST_PAUSE = 6, 384  # plain steps before a try
CHECK_SHARE = 0.001  # of the time, what plain checks may cost in the long run: where they cost nothing they stay frequent
TRY_SHARE = 0.005  # of the time, what tries may cost in the long run: it bounds the pause
TRY_ROWS = 4  # of one try: each may have a long text to be read first
TRY_STEPS = 2  # of one try, while something is kept
SUDDEN, LASTING = 0.9, 0.98  # fading of the errors that are watched, and of their usual size
SIGNIFICANT = 3.5  # standard deviations
LIMIT = SIGNIFICANT**2 / (1 - SUDDEN**2)  # of the square of their fading sum, over their mean square


def few(wanted: Sequence[int]) -> list[int]:
    """What a try asks for, where these would be drafting: the first rows are enough to see whether anything is kept."""
    left, asked = TRY_ROWS, []
    for count in wanted:
        asked.append(count if left else 0)
        left -= bool(count) and left > 0
    return asked


class GrowthChecks:
    """When the next larger size is due: what it costs and brings is a guess until it is seen, perhaps far too bad a one."""

    def __init__(self) -> None:
        self._since, self._interval = 0, FIRST_GROWTH

    def due(self, steps: int) -> int | None:
        """Which of the coming steps, counted from 0, it is, while drafting pays; None: a later one."""
        ahead = max(0, self._interval - self._since - 1)
        if ahead >= steps:
            self._since += steps
            return None
        self._since, self._interval = steps - 1 - ahead, min(2 * self._interval, LAST_GROWTH)
        return ahead

    def restart(self) -> None:
        """Another length was chosen: its neighbour is another one, too."""
        self._interval = FIRST_GROWTH


class PlainChecks:
    """When a plain step is due while drafting pays."""

    def __init__(self) -> None:
        self._since, self._interval = 0, FIRST_CHECK

    def due(self, steps: int, gain: float) -> int | None:
        """Which of the coming steps, counted from 0, it is, while drafting pays; None: a later one. `gain`: its goodput over that
        of plain decoding."""
        longest = max(FIRST_CHECK, min(int((gain - 1) / CHECK_SHARE), LAST_CHECK))
        ahead = max(0, min(self._interval, longest) - self._since)
        if gain >= CLOSE or ahead >= steps:
            self._since += steps
            return None
        self._since, self._interval = steps - 1 - ahead, min(2 * self._interval, LAST_CHECK)
        return ahead

    def restart(self) -> None:
        """Steps are plain anyway."""
        self._since = 0


class Surprise:
    """Whether the latest predictions of kept nodes erred more, in one direction, than chance explains."""

    def __init__(self) -> None:
        self._sum, self._square = 0.0, 1.0

    def observe(self, error: float | None) -> bool:
        """`error`: kept nodes less expected ones, None where that is unknown. True where the text has changed; then it starts
        anew."""
        if error is None:
            return False
        self._sum = SUDDEN * self._sum + error
        usual, self._square = self._square, LASTING * self._square + (1 - LASTING) * error * error
        if self._sum * self._sum < LIMIT * usual:
            return False
        self._sum = 0.0
        return True


class Tries:
    """When one node is asked for although drafting does not pay."""

    def __init__(self) -> None:
        self._pause, self._longest = FIRST_PAUSE, LONGEST_PAUSE
        self._waited = 0  # plain steps since the last try
        self._left = 0  # steps that the present try may still take
        self._drafting = 0  # steps since drafting began to pay again

    @property
    def is_open(self) -> bool:
        """Whether the present step is one of a try."""
        return self._left > 0

    def rest(self, steps: int) -> None:
        """Drafting pays for so many steps: no try. After a while the next pause is short again."""
        self._left = self._waited = 0
        self._drafting += steps
        if self._drafting >= FIRST_PAUSE:
            self._pause = FIRST_PAUSE

    def is_due(self, price: float) -> bool:
        """Whether the coming step is one of a try. `price`: what one node adds to the seconds of a plain step, in shares."""
        self._drafting = 0
        self._longest = max(FIRST_PAUSE, min(int(price / TRY_SHARE), LONGEST_PAUSE))
        if not self._left:
            self._waited += 1
            if self._waited > min(self._pause, self._longest):
                self._left, self._waited = TRY_STEPS, 0
        return self._left > 0

    def wait(self, most: int) -> int:
        """Of how many steps, the coming one and those after it, up to `most`, none is one of a try. Asked once before them."""
        rest = max(0, min(most - 1, min(self._pause, self._longest) - self._waited))
        self._waited += rest
        return 1 + rest

    def observe(self, accepted: int | None) -> None:
        """What all rows of a step of a try kept; None: nothing was offered. The try goes on unless all was rejected."""
        self._left = 0 if accepted == 0 else self._left - 1
        if not self._left:
            self._pause = min(2 * self._pause, self._longest)


class Entrance:
    """When drafting begins again: a draft model then reads all that was said without it. As one rents skis until the rent would
    have bought them: when the gain that was let go by is as large as that price. Whoever begins at the first promise pays it at
    every turn of a load at which drafting is worth next to nothing."""

    def __init__(self) -> None:
        self._missed = 0.0

    def opens(self, gain: float, price: float, steps: int = 1) -> bool:
        """`gain`: promised for a step; `price`: of beginning. Both in plain steps. `steps`: since this was last asked."""
        self._missed += gain * (steps if self._missed else 1)
        return self._missed >= price

    def close(self) -> None:
        """Nothing is promised, or drafting has begun."""
        self._missed = 0.0
