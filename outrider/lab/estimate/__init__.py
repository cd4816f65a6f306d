"""Speedup without running anything: the formula of `lab/predict.py` as a table, from numbers or
from a result of `bench`."""

from outrider.extras import check_lab

check_lab("estimate")
