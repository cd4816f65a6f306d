"""What real servers sent, recorded from runs of our own (`fixtures/`), and what we read from it.

    vllm_before, _after.prom  /metrics of vLLM 0.32.0 around a bench of two levels, n-gram drafts of 3; cut down
    vllm_plain.prom           the same without speculation
    vllm.sse                  vLLM 0.32.0 with a draft model and --per-request-spec-decode-metrics summary
    vllm_refusal.sse          vLLM 0.32.0: refused after it had answered 200
    llama_cpp_python.sse      llama-cpp-python 0.3.36: no usage, whatever is asked for
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.lab.server.counters import difference, parse
from outrider.lab.server.stream import BadStreamError, Stream
from outrider.lab.server.types import SpeculationCounts

FIXTURES = Path(__file__).parent / "fixtures"


def page(name: str) -> str:
    return (FIXTURES / f"{name}.prom").read_text(encoding="utf-8")


def played(name: str) -> Stream:
    """One event a second."""
    stream = Stream()
    lines = (FIXTURES / f"{name}.sse").read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(line for line in lines if line):
        stream.feed(line.removeprefix("data: "), float(index + 1))
    return stream


def test_vllm_counters() -> None:
    """The numbers that vLLM's own log summed up over the run: accepted 52 + 184, drafted 213 + 828."""
    window = difference(parse(page("vllm_before"), "pair-14M"), parse(page("vllm_after"), "pair-14M"))
    counts = window.speculation
    assert counts == SpeculationCounts(
        num_steps=347, num_draft_tokens=213 + 828, num_accepted_tokens=52 + 184, num_full_steps=36,
        accepted_per_position=[136, 64, 36],
    )  # fmt: skip
    assert counts is not None
    assert counts.tau == pytest.approx(1.680, abs=5e-4)
    assert window.num_generated == 2 * 8 * 48 + 4 * 16, "8 answers at each of two levels and 2 + 2 warm-ups"
    assert (window.num_prompt_tokens, window.num_cached_tokens) == (1398, 128)
    assert window.notes == []


def test_vllm_without_speculation() -> None:
    plain = parse(page("vllm_plain"), "pair-14M")
    window = difference(plain, plain)
    assert plain.engine == "vllm"
    assert window.speculation is None
    assert window.num_generated == 0
    assert any("no speculation counters" in note for note in window.notes)


def test_vllm_stream() -> None:
    """A chunk holds the tokens of a step."""
    stream = played("vllm")
    assert "".join(stream.texts) == " He needs to buy 4*2=<<4*2=4>>4 pounds of food.\nSo he has"
    assert (len(stream.chunks_s), stream.seconds) == (11, 11.0)
    assert (stream.num_tokens, stream.num_prompt_tokens, stream.num_cached_tokens) == (24, 26, 0)
    assert (stream.finish_reason, stream.ended) == ("length", True)


def test_vllm_refuses_in_the_stream() -> None:
    with pytest.raises(BadStreamError, match="min_p") as error:
        played("vllm_refusal")
    assert (error.value.kind, error.value.status) == ("aborted", 400)


def test_llama_cpp_python_stream() -> None:
    stream = played("llama_cpp_python")
    assert "".join(stream.texts) == " Let $a$ be the"
    assert (len(stream.chunks_s), stream.seconds) == (6, 7.0)
    assert (stream.num_tokens, stream.num_prompt_tokens) == (None, None)
    assert (stream.finish_reason, stream.ended) == ("length", True)
