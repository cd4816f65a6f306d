"""`make pages`: every command of README and the tour is run, with the extras that its page names
before it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tools import page_commands
from tools.page_commands import PAGES, ROOT, SKIPPED, Step, adapted, steps_of

PAGE = """
```sh
make demo     # everything
```

Sections 1 and 3 need more packages: `pip install '.[lora,train]'`.

## 1. One

```sh
outrider train eagle3 \\
  --target ORG/MODEL
```

## 2. Two

```sh
pip install '.[services]'
outrider new-verb "a # b" && echo "done"
```

```python
print("MODEL")
```

```json
{"no": "command"}
```
"""


def steps(text: str) -> list[tuple[int, str, str, list[str]]]:
    return [
        (step.line, step.language, step.code, sorted(step.extras))
        for step in steps_of("page.md", text)
    ]


def test_commands_have_the_extras_that_the_page_names() -> None:
    assert steps(PAGE) == [
        (3, "sh", "make demo", ["lab"]),
        (11, "sh", "outrider train eagle3   --target ORG/MODEL", ["lora", "train"]),
        (19, "sh", 'outrider new-verb "a # b" && echo "done"', ["services"]),
        (23, "python", 'print("MODEL")\n', ["services"]),
    ]


def command(code: str) -> str:
    return adapted(Step("page.md", 1, "sh", code, frozenset()), 81).code


def test_what_is_run_is_quick_and_local() -> None:
    assert command("make demo").startswith("outrider demo --questions 1")
    assert command("outrider certify MODEL && echo MODEL-Q4") == (
        "outrider certify demo --limit 2 --max-tokens 16 && echo MODEL-Q4"
    )
    assert command("outrider serve Qwen/Qwen2.5-7B-Instruct") == "outrider serve demo --port 81"
    assert command("curl localhost:8000/v1/models") == (
        "curl --silent --show-error --fail-with-body 127.0.0.1:81/v1/models"
    )
    assert command("outrider new-verb x") == "outrider new-verb x", (
        "a new command runs as it stands"
    )
    assert command("outrider chat demo").endswith("| outrider chat demo")


@pytest.mark.parametrize("page", PAGES)
def test_no_command_of_a_page_is_overlooked(page: str) -> None:
    """Every line that begins with our name, wherever it stands; and what is left out is on a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = list(steps_of(page, text))
    shown = re.findall(r"^(?:outrider|curl|make|uvx|pip install) [^'].*", text, re.MULTILINE)
    assert len([step for step in found if step.language == "sh"]) == len(shown)
    assert any(step.extras for step in found)
    assert any(not step.extras for step in found)


def test_what_is_left_out_is_on_a_page() -> None:
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    codes = {
        step.code for page, text in zip(PAGES, texts, strict=True) for step in steps_of(page, text)
    }
    assert set(SKIPPED) <= codes
    for name in page_commands.STAND_INS:
        assert any(name in text for text in texts), name


@pytest.mark.slow
def test_a_command_that_fails_is_shown(tmp_path: Path) -> None:
    environment = page_commands.Environment.__new__(page_commands.Environment)
    environment._bin = Path(sys.executable).parent
    fails = Step("page.md", 1, "sh", "echo why && exit 3", frozenset())
    assert environment.run(fails, tmp_path) == "ended with 3:\n    why"
    assert environment.run(Step("page.md", 1, "python", "print(1)", frozenset()), tmp_path) == ""
    server = Step("page.md", 1, "sh", "outrider serve", frozenset())
    assert page_commands.run_steps(environment, [server, fails], tmp_path) == 2, (
        "a server that ends is a failure, too"
    )
