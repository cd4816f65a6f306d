"""The workload `agent`: a session of a coding agent of 30 turns over one small project.

    python -m tools.agent_session outrider/lab/workload/embedded/agent.jsonl

Each turn is the result of a tool that the agent is told to have used, and what it is to write next;
the context grows from turn to turn, and most of an answer stands in it already, as it does when
files are edited. The answers that later turns have before them are written here, and are right: a
model as small as those at hand repeats itself after a few turns of its own, which would flatter
drafts that look up. What is measured is the model's answer to each turn.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

SYSTEM = (
    "You are a coding agent in a small Python project. You have the tools read_file, search, "
    "run_tests and write_file. After each result of a tool, write what you are asked for, and "
    "nothing else."
)
FILES = {
    "stock.py": '''class Stock:
    """Counts of articles by name."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, name: str, count: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + count

    def take(self, name: str, count: int) -> None:
        self.counts[name] = self.counts[name] - count

    def total(self) -> int:
        return sum(self.counts.values())
''',
    "orders.py": '''from stock import Stock


class Order:
    """Articles that a customer wants."""

    def __init__(self, customer: str, wanted: dict[str, int]) -> None:
        self.customer = customer
        self.wanted = wanted

    def fill(self, stock: Stock) -> bool:
        for name, count in self.wanted.items():
            stock.take(name, count)
        return True
''',
    "report.py": """from stock import Stock


def report(stock: Stock) -> str:
    lines = []
    for name, count in stock.counts.items():
        lines.append(name + ": " + str(count))
    return "\\n".join(lines)
""",
    "test_stock.py": """from orders import Order
from stock import Stock


def test_take() -> None:
    stock = Stock()
    stock.add("bolts", 3)
    stock.take("bolts", 2)
    assert stock.counts == {"bolts": 1}


def test_fill() -> None:
    stock = Stock()
    stock.add("nuts", 1)
    assert not Order("Ann", {"nuts": 2}).fill(stock)
""",
}


def lines_of(name: str, first: int, last: int) -> str:
    """The result of `read_file`: numbered lines of a file."""
    lines = FILES[name].splitlines()[first - 1 : last]
    return "\n".join(f"{number:3} {line}" for number, line in enumerate(lines, first))


def body(name: str, first: int, last: int) -> str:
    """Lines of a file as an agent writes them, without numbers."""
    lines = FILES[name].splitlines()[first - 1 : last]
    return textwrap.dedent("\n".join(lines))


def hits_of(word: str) -> str:
    """The result of `search`."""
    return "\n".join(
        f"{name}:{number}: {line.strip()}"
        for name, text in FILES.items()
        for number, line in enumerate(text.splitlines(), 1)
        if word in line
    )


def failure(test: str, line: str, error: str) -> str:
    """The result of `run_tests` where one fails."""
    return f"FAILED test_stock.py::{test}\n>   {line}\nE   {error}\n1 failed, 1 passed in 0.02s"


def read(name: str, first: int, last: int, wish: str) -> str:
    return f"Result of read_file({name}, {first}-{last}):\n{lines_of(name, first, last)}\n\n{wish}"


def search(word: str, wish: str) -> str:
    return f"Result of search({word!r}):\n{hits_of(word)}\n\n{wish}"


def ran(result: str, wish: str) -> str:
    return f"Result of run_tests():\n{result}\n\n{wish}"


def wrote(name: str, wish: str) -> str:
    return f"Result of write_file({name}): ok\n\n{wish}"


SHORT = failure("test_fill", 'assert not Order("Ann", {"nuts": 2}).fill(stock)', "assert not True")
MISSING = failure("test_take", 'stock.take("bolts", 2)', "KeyError: 'bolts'")
PASSED = "2 passed in 0.01s"

CHECKED = """def take(self, name: str, count: int) -> None:
    if self.counts[name] < count:
        raise ValueError(name)
    self.counts[name] = self.counts[name] - count"""
LENIENT = """def take(self, name: str, count: int) -> None:
    if self.counts.get(name, 0) < count:
        raise ValueError(name)
    self.counts[name] = self.counts[name] - count"""
FORMATTED = """def report(stock: Stock) -> str:
    lines = []
    for name, count in stock.counts.items():
        lines.append(f"{name}: {count}")
    return "\\n".join(lines)"""
TOTAL = """def test_total() -> None:
    stock = Stock()
    stock.add("bolts", 3)
    stock.add("nuts", 2)
    assert stock.total() == 5"""
RETURNS = """def fill(self, stock: Stock) -> bool:
    try:
        for name, count in self.wanted.items():
            stock.take(name, count)
    except ValueError:
        return False
    return True"""

# (what the agent is told, what it answered)
TURNS = (
    (
        read("stock.py", 1, 8, "Say in one sentence what the class does."),
        "Stock counts how many of each article there are.",
    ),
    (
        read("stock.py", 7, 14, "Copy the method take without line numbers."),
        body("stock.py", 10, 11),
    ),
    (
        read("test_stock.py", 5, 9, "Say in one sentence what the test expects."),
        "After 2 of 3 bolts are taken, 1 bolt is left.",
    ),
    (
        ran(SHORT, "Name the test that fails and the line that fails."),
        'test_fill fails at: assert not Order("Ann", {"nuts": 2}).fill(stock)',
    ),
    (
        read("orders.py", 4, 14, "Copy the method fill without line numbers."),
        body("orders.py", 11, 14),
    ),
    (search("take", "List the files that use take."), "stock.py, orders.py, test_stock.py"),
    (
        ran(
            SHORT,
            "Write the method take again, so that it raises ValueError when there are too few.",
        ),
        CHECKED,
    ),
    (
        wrote("stock.py", "Write a one-line commit message."),
        "Stock.take: refuse to take more than there is",
    ),
    (
        ran(MISSING, "Say in one sentence why the test fails."),
        "self.counts has no key bolts, and self.counts[name] raises KeyError for it.",
    ),
    (
        read("stock.py", 10, 11, "Write the method take again, with self.counts.get(name, 0)."),
        LENIENT,
    ),
    (wrote("stock.py", "Copy the method take as it is now."), LENIENT),
    (
        read("report.py", 4, 8, "Copy the function report without line numbers."),
        body("report.py", 4, 8),
    ),
    (search("counts", "List the files that use counts."), "stock.py, report.py, test_stock.py"),
    (read("report.py", 4, 8, "Write the function report again with an f-string."), FORMATTED),
    (
        wrote("report.py", "Write a one-line commit message."),
        "report: f-string in place of concatenation",
    ),
    (
        ran(PASSED, "Say in one sentence what the result means."),
        "Both tests pass, so the changes broke nothing that they cover.",
    ),
    (
        read("orders.py", 7, 9, "Copy the method __init__ without line numbers."),
        body("orders.py", 7, 9),
    ),
    (search("Stock", "List the files that import Stock."), "orders.py, report.py, test_stock.py"),
    (
        read("test_stock.py", 12, 15, "Copy the test without line numbers."),
        body("test_stock.py", 12, 15),
    ),
    (ran(PASSED, "Write a test like test_take for the method total."), TOTAL),
    (wrote("test_stock.py", "Copy the new test again."), TOTAL),
    (
        read("stock.py", 13, 14, "Copy the method total without line numbers."),
        body("stock.py", 13, 14),
    ),
    (search("wanted", "List the lines that use wanted."), "orders.py:7, orders.py:9, orders.py:12"),
    (
        read(
            "orders.py",
            11,
            14,
            "Write the method fill again, so that it returns False at a ValueError.",
        ),
        RETURNS,
    ),
    (wrote("orders.py", "Copy the method fill as it is now."), RETURNS),
    (
        ran(PASSED, "Write a one-line commit message."),
        "Order.fill: return False where the stock has too few",
    ),
    (
        search("def ", "List the names of all functions."),
        "__init__, add, take, total, __init__, fill, report, test_take, test_fill",
    ),
    (
        read("test_stock.py", 1, 9, "Copy the first test without line numbers."),
        body("test_stock.py", 5, 9),
    ),
    (
        read("stock.py", 1, 14, "Copy the whole class without line numbers."),
        body("stock.py", 1, 14),
    ),
    (
        ran(PASSED, "Summarise in two sentences what was changed."),
        "Stock.take raises ValueError when there are too few of an article, and Order.fill returns "
        "False then. The report uses an f-string, and total has a test.",
    ),
)


def conversation() -> Iterator[dict[str, str]]:
    """The turns, in ShareGPT's spelling."""
    yield {"from": "system", "value": SYSTEM}
    for result, answer in TURNS:
        yield {"from": "human", "value": result}
        yield {"from": "gpt", "value": answer}


def session() -> str:
    """The file's one line."""
    entry = {"id": "agent", "task": "agent", "conversations": list(conversation())}
    return json.dumps(entry, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(session(), encoding="utf-8")
