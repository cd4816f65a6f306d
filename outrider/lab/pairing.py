"""The change of a ratio of sums between two runs over the same prompts, prompt by prompt.

Prompts differ far more than runs do. Two intervals that each allow for other prompts cannot tell a small change; what happened
to each prompt can. With a_i / b_i the parts of prompt i (seconds of plain decoding and own seconds, or tokens and seconds), the
number is A / B = sum a_i / sum b_i, and the logarithm of new over old has, to first order (the delta method), the influence

    z_i = (a'_i / A' - b'_i / B') - (a_i / A - b_i / B)

of each prompt, and the variance n / (n - 1) sum z_i^2. Student's t with n - 1 degrees of freedom gives the interval: it says
what would come out over other prompts of the same sort. What shifts a whole run (a warm machine) is in none of its prompts
alone, and not in the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from scipy.stats import t as student

from outrider.lab.result import Interval

MIN_PAIRS = 4  # below, the t distribution is so wide that nothing is ever found
Parts = Mapping[str, tuple[float, float]]  # prompt -> what stands above and below the line


def paired_ratio(old: Parts, new: Parts, level: float) -> tuple[Interval, int] | None:
    """New over old on the prompts that both have, and their number; None for fewer than MIN_PAIRS or sums that are 0."""
    shared = [prompt for prompt in old if prompt in new]
    if len(shared) < MIN_PAIRS:
        return None
    above, below, new_above, new_below = np.array([(*old[prompt], *new[prompt]) for prompt in shared], dtype=np.float64).T
    sums = [math.fsum(part) for part in (above, below, new_above, new_below)]  # the same in any order: equal runs give 1
    if min(sums) <= 0:
        return None
    influence = new_above / sums[2] - new_below / sums[3] - above / sums[0] + below / sums[1]
    error = math.sqrt(len(shared) / (len(shared) - 1) * float(influence @ influence))
    reach = error * float(student.ppf((1 + level) / 2, len(shared) - 1))
    value = (sums[2] / sums[3]) / (sums[0] / sums[1])
    return Interval(value=value, low=value * math.exp(-reach), high=value * math.exp(reach), level=level), len(shared)
