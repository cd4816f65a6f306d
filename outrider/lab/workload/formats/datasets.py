"""Benchmarks in the files they are published as: GSM8K, MATH, HumanEval, Spec-Bench and MT-bench.

Reasoning is asked as plain text, `Question: ...\\nAnswer:`, so that base models and chat models get the same. Code is a beginning
to complete. The rest of Spec-Bench is a conversation of one turn; later turns would need the model's own answers.
"""

from __future__ import annotations

from outrider.lab.workload.formats.fields import Fields, Turns, UnusableError, identity, optional_text, prompt_text
from outrider.lab.workload.grade import boxed
from outrider.lab.workload.types import WorkloadRequest

MARK = "####"  # what GSM8K writes before a final answer
SPEC_BENCH_TASKS = {
    "translation": "translation", "summarization": "summarization", "qa": "qa", "math_reasoning": "reasoning", "rag": "rag",
}  # fmt: skip


def question(text: str) -> str:
    """The prompt of a word problem."""
    return f"Question: {text.strip()}\nAnswer:"


def read_gsm8k(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """`question` and `answer`: a worked solution that ends in `#### N`; without the mark, a question with a short answer."""
    answer = optional_text(entry, "answer") or ""
    asked, reference = question(prompt_text(entry, "question")), after_mark(answer)
    name = identity(entry, "id")
    if reference is None:
        task = optional_text(entry, "task") or "qa"
        return [WorkloadRequest(id=name, prompt=asked, task=task, reference=answer.strip() or None)]
    return [WorkloadRequest(id=name, prompt=asked, task="reasoning", reference=reference)]


def read_math(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """`problem` and its `answer`, or a `solution` with the answer in a box."""
    reference = optional_text(entry, "answer") or boxed(optional_text(entry, "solution") or "")
    name = identity(entry, "id", "unique_id", "idx")
    return [WorkloadRequest(id=name, prompt=question(prompt_text(entry, "problem")), task="reasoning", reference=reference)]


def read_humaneval(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """The head of a function. No reference: whether code is right shows when it runs, and it is not run here."""
    return [WorkloadRequest(id=identity(entry, "task_id"), prompt=prompt_text(entry, "prompt"), task="code")]


def read_spec_bench(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """The first of `turns`. Only `math_reasoning` has references with one right answer."""
    asked = entry["turns"]
    if not isinstance(asked, list) or not asked:
        raise UnusableError("'turns' must be a list of questions, got none")
    first = prompt_text({"turns": asked[0]}, "turns")
    name, task = identity(entry, "question_id", "id"), SPEC_BENCH_TASKS.get(str(entry.get("category")), "chat")
    if task == "reasoning":
        solutions = entry.get("reference")
        solution = solutions[0] if isinstance(solutions, list) and solutions else solutions
        reference = after_mark(solution) if isinstance(solution, str) else None
        return [WorkloadRequest(id=name, prompt=question(first), task=task, reference=reference)]
    return [WorkloadRequest(id=name, messages=({"role": "user", "content": first},), task=task)]


def after_mark(solution: str) -> str | None:
    """What stands behind the last `####` of a worked solution."""
    _, mark, answer = solution.rpartition(MARK)
    return answer.strip() or None if mark else None
