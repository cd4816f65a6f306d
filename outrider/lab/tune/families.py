"""Which families are worth a probe, and why others are not (docs/tune.md, "What competes").

Left out:

    token          block, the default of chains, keeps at least as many tokens whatever the distributions (Sun et al. 2403.10444)
    multi-round    traversal, the default of trees, keeps at least as many: the same of placed nodes, more of drawn ones
                   (Weng et al. 2505.12398; exact numbers in docs/algorithms/trees.md)
    best-first     drawn: rows that draw get sequoia's shape, so it would be the same draft twice
    typical, top-k are lossy
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from outrider.configuration import PLAIN
from outrider.drafters import DRAFTERS
from outrider.drafters.base import LARGE_TREE, SMALL_TREE, Drafter
from outrider.lab.tune.space import Family, TrainedHead, TuneRequest
from outrider.models.heads.kinds import ACCEPTANCE, EARLY_EXIT
from outrider.trees.plan import TreeSettings

CHAIN_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
HEAD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)  # heads are trained for the next few tokens
LONG_SIZES = (12,)  # between those and a head's own bound
LOOKUP_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # copies cost nothing, so longer ones may pay
SLOW_SIZES = (1, 2, 3, 4, 5)  # of drafts that cost a good part of a target pass each
TREE_SIZES = (SMALL_TREE, LARGE_TREE)
WIDE_TREE_SIZES = (15, 31, 63)  # where a wide pass costs hardly more than a narrow one
EXITS = (0.25, 0.5, 0.75)  # shares of the target's layers
BITS = (8, 4)
PLACED: dict[str, Any] = {"sample_from": 99.0}  # at every temperature
DRAWN: dict[str, Any] = {"sample_from": 0.0}  # likewise
USUALLY_DRAWN = TreeSettings().sample_from  # the temperature from which trees are drawn by default


def default_space(request: TuneRequest) -> list[Family]:
    """Everything that takes part by itself; of it, where `request.drafters` names some, only these,
    and those among them that take part when they are named: universal drafts and third parties'
    drafters."""
    families = [
        *_draft_model(request),
        *(family for head in request.heads for family in _head(head, request)),
        *_composite(request),
        *_model_free(request),
        *_own_weights(request),
    ]
    if request.drafters:
        there = {family.configuration.drafter for family in families}
        families = [
            family for family in families if family.configuration.drafter in request.drafters
        ]
        families += _when_named(sorted(request.drafters - there), request)
    return families


def exit_layers(num_layers: int) -> list[int]:
    """Layers that drafts stop after, of a target with this many."""
    layers = {max(1, round(share * num_layers)) for share in EXITS}
    return sorted(layer for layer in layers if layer < num_layers)


# ---------------------------------------------------------------- drafts from laws


def _draft_model(request: TuneRequest) -> Iterator[Family]:
    if request.has_draft:
        yield from _chains("draft-model", CHAIN_SIZES, request)
        yield Family.of("draft-model", CHAIN_SIZES, stop="entropy")
        yield from _trees("draft-model", ("best-first", "sequoia"), request)


def _head(head: TrainedHead, request: TuneRequest) -> Iterator[Family]:
    options = head.options
    max_tokens = head.max_chain or HEAD_SIZES[-1]
    if head.kind == ACCEPTANCE:
        yield Family.of("draft-model", CHAIN_SIZES, stop="acceptance", acceptance_head=head.folder)
    elif head.kind == EARLY_EXIT:
        yield Family.of(EARLY_EXIT, SLOW_SIZES, **options)
    elif head.kind == "medusa":
        yield from _chains("medusa", up_to(max_tokens), request, **options)
        yield from _planned_tree("medusa", request, **options)
    else:
        yield from _chains(head.kind, up_to(max_tokens), request, **options)
        if head.confidence:
            yield Family.of(head.kind, up_to(max_tokens), stop="confidence", **options)
        if head.kind != "mtp" or head.max_chain is None:  # layers that take turns draft chains
            yield from _trees(head.kind, ("best-first",), request, **options)


def _chains(
    drafter: str, sizes: Sequence[int], request: TuneRequest, **part_options: Any
) -> Iterator[Family]:
    yield Family.of(drafter, sizes, **part_options)
    if not request.sampling.is_greedy:
        yield Family.of(drafter, sizes, verifier="gumbel", **part_options)


def _trees(
    drafter: str, shapes: Iterable[str], request: TuneRequest, **part_options: Any
) -> Iterator[Family]:
    """Placed in each of these shapes; sampled rows also drawn, and placed by the noise that they
    are verified with."""
    if not request.trees:
        return
    usually_drawn = request.sampling.temperature >= USUALLY_DRAWN
    sizes = _tree_sizes(request)
    for shape in shapes:
        yield Family.of(
            drafter,
            sizes,
            nested=False,
            tree=shape,
            **(PLACED if usually_drawn else {}),
            **part_options,
        )
    if not request.sampling.is_greedy:
        yield Family.of(
            drafter,
            sizes,
            nested=False,
            tree="sequoia",
            **({} if usually_drawn else DRAWN),
            **part_options,
        )
        yield Family.of(
            drafter, sizes, nested=False, verifier="gumbel", tree="best-first", **part_options
        )


def _planned_tree(drafter: str, request: TuneRequest, **part_options: Any) -> Iterator[Family]:
    """Medusa's own shape, planned by the accuracies of its heads."""
    if request.trees:
        sizes = _tree_sizes(request)
        yield Family.of(drafter, sizes, nested=False, tree="medusa", **part_options)
        if not request.sampling.is_greedy:
            other = PLACED if request.sampling.temperature >= USUALLY_DRAWN else DRAWN
            yield Family.of(drafter, sizes, nested=False, tree="medusa", **other, **part_options)


def _composite(request: TuneRequest) -> Iterator[Family]:
    """Look-up alongside the one that drafts from laws: the draft model, else the first head. As a
    chain, and for greedy rows (drawn trees take long) as a tree."""
    heads = [head for head in request.heads if head.kind not in (ACCEPTANCE, EARLY_EXIT)]
    if not request.trees or not (request.has_draft or heads):
        return
    name = "draft-model" if request.has_draft else heads[0].kind
    tree = f"{name}.tree={'medusa' if name == 'medusa' else 'best-first'}"
    has_tree = request.sampling.is_greedy and not (name == "mtp" and heads[0].max_chain is not None)
    folder = "" if request.has_draft else heads[0].folder
    given = [f"{name}.head={folder}"] if folder else []
    for options in [given, [*given, tree]] if has_tree else [given]:
        yield Family.of(
            "composite",
            _tree_sizes(request),
            nested=False,
            parts=f"{name},suffix",
            **({"options": ";".join(options)} if options else {}),
        )


# ---------------------------------------------------------------- the others


def _model_free(request: TuneRequest) -> Iterator[Family]:
    yield Family.of("ngram", LOOKUP_SIZES)
    yield Family.of("suffix", LOOKUP_SIZES)
    if request.trees:
        sizes = _tree_sizes(request)
        yield Family.of("ngram-cache", sizes, nested=False)
        yield Family.of("recycling", sizes, nested=False)
        yield Family.of("lookahead", (11,), nested=False)
    if request.corpus is not None:
        yield Family.of("retrieval", LOOKUP_SIZES, branches=1, corpus=request.corpus)


def _own_weights(request: TuneRequest) -> Iterator[Family]:
    if request.own_weights:
        for layer in exit_layers(request.num_layers):
            yield Family.of(EARLY_EXIT, SLOW_SIZES, exit_layer=layer)
        for bits in BITS:
            yield Family.of("quantised", SLOW_SIZES, bits=bits)


def _when_named(names: Sequence[str], request: TuneRequest) -> Iterator[Family]:
    """A family that the user named, with its own settings as they are; nothing for one that needs
    what is not there."""
    for name in names:
        if name in (PLAIN, "retrieval"):
            continue
        kind: type[Drafter] = DRAFTERS.load(name)
        required = kind.requirements(kind.Settings())
        if required.head or (required.draft and not request.has_draft):
            continue
        if (required.trees and not request.trees) or (required.module and not request.own_weights):
            continue
        if required.trees:
            yield Family.of(name, _tree_sizes(request), nested=False)
        else:
            yield Family.of(name, CHAIN_SIZES if required.draft else LOOKUP_SIZES)


def _tree_sizes(request: TuneRequest) -> tuple[int, ...]:
    return WIDE_TREE_SIZES if request.on_accelerator else TREE_SIZES


def up_to(max_tokens: int) -> list[int]:
    """Lengths of chains of at most this many tokens."""
    return [*(size for size in (*HEAD_SIZES, *LONG_SIZES) if size < max_tokens), max_tokens]
