"""Speedup without running anything: from acceptance, costs, sizes and bandwidth, by three models side by side."""

from outrider.extras import check_lab

check_lab("estimate")
