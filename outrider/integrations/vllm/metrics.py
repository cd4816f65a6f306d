"""Our counters on vLLM's /metrics page, although they are counted in another process than the one
that answers it.

vLLM's engine works in a process of its own, and its page is made in the server's. So counters are
written into memory-mapped files of prometheus-client's own format, one file for each kind of metric
and process:

    several API servers    vLLM sets PROMETHEUS_MULTIPROC_DIR, and its page is made from all files there: ours go there, too
    one                    `announce` makes a folder in the server's process, registers a reader of it in vLLM's registry, and
                           hands its name to the processes that are started later, by the
                           environment
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from bisect import bisect_left
from pathlib import Path

from prometheus_client import REGISTRY, multiprocess
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.utils import floatToGoString

FOLDER = "OUTRIDER_VLLM_METRICS"  # in the environment: where a single API server reads
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # in the environment: where several do
PREFIX = "outrider:"
BUCKETS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, float("inf"))  # seconds
SECONDS = "propose_seconds"
HELP = {
    SECONDS: "Seconds that Outrider's drafter took in one step, all texts together.",
    "texts": "Texts that began: each is read to its end once.",
    "rows": "Texts asked for a draft, by outcome: drafted, or nothing found.",
    "draft_tokens": "Draft tokens proposed, by the part that proposed them.",
    "accepted_tokens": "Draft tokens that are in the text, by the part that proposed them.",
}


def announce() -> None:
    """Make vLLM's /metrics page of this process show what drafters in other processes count. Once a
    process tree."""
    if os.environ.get(FOLDER) or os.environ.get(SHARED):
        return
    folder = tempfile.mkdtemp(prefix="outrider-vllm-")
    os.environ[FOLDER] = folder
    owner = os.getpid()
    atexit.register(
        lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None
    )
    multiprocess.MultiProcessCollector(REGISTRY, path=folder)


class Meter:
    """Counts for one drafter; `None` as folder counts for nobody."""

    def __init__(self, drafter: str, folder: Path) -> None:
        self._drafter = drafter
        self._counters = MmapedDict(str(folder / f"counter_outrider-{os.getpid()}.db"))
        self._histograms = MmapedDict(str(folder / f"histogram_outrider-{os.getpid()}.db"))
        self._values: dict[str, float] = {}
        for bound in BUCKETS:
            self._add(self._histograms, self._bucket(bound), 0)

    @classmethod
    def find(cls, drafter: str) -> Meter | None:
        """The counters of this process; None where nobody would read them (vLLM's plug-ins were not
        loaded)."""
        folder = os.environ.get(SHARED) or os.environ.get(FOLDER)
        return cls(drafter, Path(folder)) if folder and os.path.isdir(folder) else None

    def started(self, texts: int) -> None:
        """Count texts that began."""
        self._count("texts", texts)

    def proposed(self, part: str, tokens: int) -> None:
        """A text was drafted `tokens` tokens by `part`."""
        self._count("rows", 1, outcome="drafted" if tokens else "nothing")
        if tokens:
            self._count("draft_tokens", tokens, part=part)

    def kept(self, part: str, tokens: int) -> None:
        """A text has `tokens` of what `part` drafted."""
        if tokens:
            self._count("accepted_tokens", tokens, part=part)

    def took(self, seconds: float) -> None:
        """A step's drafts took so long."""
        self._add(self._histograms, self._bucket(BUCKETS[bisect_left(BUCKETS, seconds)]), 1)
        self._add(self._histograms, self._key(SECONDS, "_sum"), seconds)

    def _count(self, metric: str, amount: float, **labels: str) -> None:
        self._add(self._counters, self._key(metric, "_total", **labels), amount)

    def _bucket(self, bound: float) -> str:
        return self._key(SECONDS, "_bucket", le=floatToGoString(bound))

    def _key(self, metric: str, suffix: str, **labels: str) -> str:
        name = PREFIX + metric
        labels = {"drafter": self._drafter, **labels}
        return mmap_key(name, name + suffix, list(labels), list(labels.values()), HELP[metric])

    def _add(self, file: MmapedDict, key: str, amount: float) -> None:
        value = self._values.get(key)
        if value is None:
            value = file.read_value(key)[0]  # an earlier engine of this process may have counted
        self._values[key] = value + amount
        file.write_value(key, value + amount, 0.0)
