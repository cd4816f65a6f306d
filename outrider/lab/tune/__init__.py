"""Which drafter, how many tokens, at which load: measured once, predicted for everything, confirmed
where it matters. `tune.py` has the stages in their order."""

from outrider.extras import check_lab

check_lab("tune")
