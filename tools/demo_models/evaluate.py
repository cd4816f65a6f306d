"""What the demo pair can do, measured: accuracy per grade, loss per source, and how well the draft
guesses.

The number that matters for speculation is τ, tokens kept per target pass. With greedy decoding and
a chain of k drafted tokens it follows exactly from the target's own greedy text: the draft's choice
after every prefix is compared with what the target wrote, because an accepted prefix IS the
target's text. So one pass of each model gives τ for every k, without a speculative loop. τ counts
the bonus token.
"""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_models.corpus import EOS_ID, TokenSource, compact_gsm8k
from tools.demo_models.problems import GRADES, is_correct, problems, read_answer

Sequenced = tuple[list[int], list[int]]  # prompt tokens, answer tokens

CHAIN_LENGTHS = (3, 5, 8)
EVALUATION_SEED = 1000


@torch.inference_mode()
def greedy_tokens(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    max_new_tokens: int,
) -> list[list[int]]:
    """The greedy continuation of each prompt, without its end token; prompts run together, padded
    on the left.
    """
    encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    width = max(map(len, encoded))
    ids = torch.tensor([[EOS_ID] * (width - len(row)) + row for row in encoded])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )[:, width:].tolist()
    return [row[: row.index(EOS_ID)] if EOS_ID in row else row for row in out]


def accuracy_by_grade(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_problems: int
) -> tuple[dict[int, float], list[list[Sequenced]]]:
    """Share of held-out problems solved, by grade; and prompt + answer tokens of all of them, for
    `chain_tau`.
    """
    scores: dict[int, float] = {}
    sequences: list[list[Sequenced]] = []
    for grade in GRADES:
        chosen = list(
            islice(problems(EVALUATION_SEED, held_out=True, weights={grade: 1.0}), num_problems)
        )
        answers = greedy_tokens(model, tokenizer, [problem.prompt for problem in chosen], 160)
        right = [
            is_correct(tokenizer.decode(a), p.answer) for a, p in zip(answers, chosen, strict=True)
        ]
        scores[grade] = sum(right) / len(right)
        sequences.append(
            [(tokenizer(p.prompt)["input_ids"], a) for a, p in zip(answers, chosen, strict=True)]
        )
    return scores, sequences


def gsm8k_test(data: Path, count: int) -> list[tuple[str, int]]:
    """(prompt, answer) of the first `count` problems of the TEST split: read here, for measurement
    only."""
    lines = islice((data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines(), count)
    rows = [json.loads(line) for line in lines]
    return [
        (f"Question: {compact_gsm8k(row['question'])}\nAnswer:", read_answer(row["answer"]) or 0)
        for row in rows
    ]


@torch.inference_mode()
def loss_by_source(
    model: LlamaForCausalLM, sources: dict[str, TokenSource], max_documents: int = 60
) -> dict[str, float]:
    """Mean nats per token of held-out documents, each read alone from its `<s>`."""
    losses = {}
    for name, source in sources.items():
        total = 0.0
        count = 0
        for index in range(min(max_documents, len(source))):
            ids = torch.from_numpy(source[index].astype("int64"))[None]
            if ids.shape[1] > 1:
                logits = model(input_ids=ids[:, :-1]).logits.float()
                total += F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
                count += ids.shape[1] - 1
        losses[name] = total / count
    return losses


@torch.inference_mode()
# (T,) bool
def draft_matches(draft: LlamaForCausalLM, prompt: list[int], answer: list[int]) -> Tensor:
    """Whether the draft's greedy choice equals the target's token, at each position of the target's
    greedy answer.
    """
    ids = torch.tensor([prompt + answer])
    guesses = draft(input_ids=ids[:, :-1]).logits[0, len(prompt) - 1 :].argmax(-1)
    return guesses == ids[0, len(prompt) :]


def count_steps(matches: Sequence[bool], chain: int) -> int:
    """Target passes that write `matches` tokens when `chain` tokens are drafted each time."""
    position = steps = 0
    while position < len(matches):
        kept = 0
        while kept < chain and position + kept < len(matches) and matches[position + kept]:
            kept += 1
        position += kept + 1
        steps += 1
    return steps


def chain_tau(draft: LlamaForCausalLM, sequences: Sequence[Sequenced]) -> dict[str, float]:
    """τ for each chain length, and α: the share of single next-token guesses that are right."""
    matches = [
        draft_matches(draft, prompt, answer).tolist() for prompt, answer in sequences if answer
    ]
    tokens = sum(map(len, matches))
    report = {"alpha": sum(map(sum, matches)) / tokens}
    for chain in CHAIN_LENGTHS:
        report[f"tau_k{chain}"] = tokens / sum(count_steps(row, chain) for row in matches)
    return report


@torch.inference_mode()
def evaluate_pair(
    target_path: Path,
    draft_path: Path,
    validation: dict[str, TokenSource],
    data: Path,
    *,
    num_problems: int,
    num_gsm8k: int = 50,
) -> dict:
    """Everything the model card states, from the exported bf16 weights."""
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    target = LlamaForCausalLM.from_pretrained(target_path, dtype=torch.bfloat16).eval()
    scores, sequences = accuracy_by_grade(target, tokenizer, num_problems)
    tests = gsm8k_test(data, num_gsm8k)
    answers = greedy_tokens(target, tokenizer, [prompt for prompt, _ in tests], 200)
    right = sum(
        is_correct(tokenizer.decode(a), want) for a, (_, want) in zip(answers, tests, strict=True)
    )
    report = {
        "num_problems_per_grade": num_problems,
        "accuracy_by_grade": scores,
        "gsm8k_test_accuracy": right / len(tests),
        "num_gsm8k_test": len(tests),
        "target_loss": loss_by_source(target, validation),
    }
    if draft_path.exists():
        draft = LlamaForCausalLM.from_pretrained(draft_path, dtype=torch.bfloat16).eval()
        report["draft_parameters"] = draft.num_parameters()
        report["draft_loss"] = loss_by_source(draft, validation)
        report["draft_on_generated"] = {
            f"grade{g}": chain_tau(draft, s) for g, s in zip(GRADES, sequences, strict=True)
        }
        gsm8k = [
            (tokenizer(prompt)["input_ids"], a)
            for a, (prompt, _) in zip(answers, tests, strict=True)
        ]
        report["draft_on_gsm8k_test"] = chain_tau(draft, gsm8k)
    return report
