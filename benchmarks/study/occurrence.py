"""Study `occurrence`: among the places where a text's last token stood before, does a small ranker
choose better than `suffix` does?

Greedy answers of SmolLM2 to seven kinds of prompts are replayed without the model, in chains of at
most 8 tokens. The ranker is linear, trained on other answers, and learns as these come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from questions import questions
from real_model import MODEL
from real_prompts import CATEGORIES, LONGEST_PROMPT
from workload import console

from outrider import LLM, SamplingParams
from outrider.drafters.lookup.suffix_search import SearchRule, best_guess
from outrider.drafters.lookup.suffix_tree import SuffixTree

BUDGET = 8
DEPTH = 64
LAYER = 25


class Recording(NamedTuple):
    tokens: list[int]
    prompt: int  # of these tokens
    states: Any  # (T, H): the target's, entering one layer; centred, of length 1


class Places(NamedTuple):
    features: Any  # (N, 4): log of match, log of age, whether the latest, similarity
    chains: list[list[int]]  # what followed
    right: Any  # (N,): tokens of a pass that drafts it


class Ranker:
    """Learns to raise the right tokens that a softmax over the places expects."""

    def __init__(self) -> None:
        # learned on ten other answers of each kind
        self.weights = np.array([7.5, -1.1, -2.1, 15.4])

    def __call__(self, places: Places) -> Any:
        scores = places.features @ self.weights
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        surplus = places.right - shares @ places.right
        self.weights = self.weights + 0.03 * (shares * surplus) @ places.features
        return scores  # from before it learned


Way = Callable[[list[Recording]], Iterator[tuple[int, int]]]  # -> tokens, nodes drafted per pass


def run_occurrence(prompts: int) -> None:
    """Print tau, and nodes drafted a pass, of every way to choose."""
    llm = LLM(str(MODEL), threads=2, drafter="suffix max_tokens=0", num_draft_tokens=BUDGET)
    texts = {kind: _answers(llm, kind, prompts) for kind in CATEGORIES}
    default = SearchRule(1, 4, 0, 0.05, 0.8)
    ranker = Ranker()
    ways: dict[str, Way] = {
        "suffix": lambda some: _suffix(some, default),
        "suffix, no cut-off": lambda some: _suffix(some, SearchRule(1, BUDGET, 0, 0, 0.8)),
        "longest, latest": lambda some: _chosen(some, lambda at: at.features @ [1e3, -1, 0, 0]),
        "most similar state": lambda some: _chosen(some, lambda at: at.features[:, 3]),
        "ranker": lambda some: _chosen(some, ranker),
        "best in hindsight": lambda some: _chosen(some, lambda at: at.right),
    }
    out = console()
    out.print(f"{'':20}" + "".join(f"{kind[:13]:>14}" for kind in (*CATEGORIES, "mean")))
    for name, way in ways.items():
        counts = [np.mean(list(way(some)), axis=0) for some in texts.values()]
        cells = [f"{tau:8.3f} @{nodes:4.2f}" for tau, nodes in [*counts, np.mean(counts, axis=0)]]
        out.print(f"{name:20}" + "".join(cells))


@torch.inference_mode()
def _answers(llm: LLM, kind: str, count: int) -> list[Recording]:
    chats = [llm.chat_prompt([{"role": "user", "content": text}]) for text in questions(kind, 40)]
    recordings = []
    for prompt in [ids for ids in chats if len(ids) <= LONGEST_PROMPT][:count]:
        answer = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=160))[0]
        tokens = [*prompt, *answer.token_ids]
        parts: list[torch.Tensor] = []
        target = llm._decoder.target
        index = target.kv.add_row()
        target.catch_up([[*tokens, 0]], (LAYER,), lambda *read, to=parts: to.append(read[2][LAYER]))
        target.kv.swap_remove(index)
        states = torch.cat(parts).float()
        # most of a state is the same in all: centred on the prompt's
        states = torch.nn.functional.normalize(states - states[: len(prompt)].mean(0), dim=1)
        recordings.append(Recording(tokens, len(prompt), states.numpy()))
    return recordings


def _taken(chain: list[int], future: list[int]) -> int:
    """Tokens of a pass: those of the chain that are right and the target's own, if there is one."""
    wrong = (at for at, token in enumerate(chain) if future[at : at + 1] != [token])
    return min(next(wrong, len(chain)) + 1, len(future))


def _suffix(texts: list[Recording], rule: SearchRule) -> Iterator[tuple[int, int]]:
    for tokens, position, _ in texts:
        tree = SuffixTree(DEPTH)
        while position < len(tokens):
            tree.extend(tokens[:position])
            guess = best_guess(tree.points, DEPTH, BUDGET, rule, from_row=True)
            taken = _taken(guess.tree.tokens, tokens[position : position + BUDGET + 1])
            yield taken, len(guess.tree)
            position += taken


def _chosen(texts: list[Recording], score: Callable[[Places], Any]) -> Iterator[tuple[int, int]]:
    for tokens, position, states in texts:
        while position < len(tokens):
            places = _places(tokens, states, position)
            chain = places.chains[int(np.argmax(score(places)))] if places.chains else []
            taken = _taken(chain, tokens[position : position + BUDGET + 1])
            yield taken, len(chain)
            position += taken


def _places(tokens: list[int], states: Any, position: int) -> Places:
    """Where the last token stood before; the latest last."""
    last = position - 1
    ends = [end for end in range(1, last) if tokens[end] == tokens[last]]
    chains = [tokens[end + 1 : min(end + 1 + BUDGET, position)] for end in ends]
    matches = [_match(tokens, end, last) for end in ends]
    ages = last - np.array(ends, int)
    # of the states that the last token was predicted from: its own comes with the next pass
    similarity = states[last - ages - 1] @ states[last - 1]
    columns = [np.log(matches), np.log(ages), ages == min(ages, default=0), similarity]
    future = tokens[position : position + BUDGET + 1]
    right = np.array([_taken(chain, future) for chain in chains])
    return Places(np.stack(columns, axis=1).astype(float), chains, right)


def _match(tokens: list[int], end: int, last: int) -> int:
    lengths = range(1, min(end + 1, DEPTH))
    return next((n for n in lengths if tokens[end - n] != tokens[last - n]), len(lengths) + 1)
