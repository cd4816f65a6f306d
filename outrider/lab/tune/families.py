"""Which families are worth a probe, and why others are not.

    draft model     chains, with and without a stop rule, trained rules that were named too; trees; with look-up in one tree
    heads           EAGLE, MTP: chains and EAGLE-2's trees; Medusa: chains up to its heads, its planned tree; block: chains up to
                    its block, which all cost one pass, ended by its own confidence if it has that,
                    trees after its Markov head
    model-free      ngram, suffix, ngram-cache, recycling, lookahead, retrieval with a corpus
    own weights     exits after a quarter, half and three quarters of the layers; 8 and 4 bits

Temperature mode: a tree's nodes are either the likeliest tokens (placed) or drawn. Where texts are
sampled both take part; greedy rows always place.

Left out:

    token          block, the default of chains, keeps at least as many tokens whatever the laws (Sun et al. 2403.10444)
    multi-round    traversal, the default of trees, keeps at least as many: the same of placed nodes, more of drawn ones
                   (Weng et al. 2505.12398; exact numbers in docs/algorithms/trees.md)
    gumbel         keeps others, neither fewer nor more for certain: it takes part where texts are sampled, for draft models and
                   heads. Of copies it keeps a token with its probability, as every lossless
                   verifier does
    best-first     drawn: rows that draw get sequoia's shape, so it would be the same draft twice
    typical, top-k are lossy
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from outrider.configuration import PLAIN
from outrider.drafters import DRAFTERS
from outrider.drafters.base import LARGE_TREE, SMALL_TREE, Drafter
from outrider.lab.tune.space import Family, SpaceOptions, TrainedHead
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


def default_space(options: SpaceOptions) -> list[Family]:
    """Everything that takes part by itself; of it, where `options.drafters` names some, only these,
    and those among them that take part when they are named: universal drafts and third parties'
    drafters."""
    families = [
        *_draft_model(options),
        *(family for head in options.heads for family in _head(head, options)),
        *_composite(options),
        *_model_free(options),
        *_own_weights(options),
    ]
    if options.drafters:
        there = {family.configuration.drafter for family in families}
        families = [
            family for family in families if family.configuration.drafter in options.drafters
        ]
        families += _when_named(sorted(options.drafters - there), options)
    return families


def exit_layers(num_layers: int) -> list[int]:
    """Layers that drafts stop after, of a target with this many."""
    layers = {max(1, round(share * num_layers)) for share in EXITS}
    return sorted(layer for layer in layers if layer < num_layers)


# ---------------------------------------------------------------- drafts from laws


def _draft_model(options: SpaceOptions) -> Iterator[Family]:
    if options.has_draft:
        yield from _chains("draft-model", CHAIN_SIZES, options)
        yield Family.of("draft-model", CHAIN_SIZES, stop="entropy")
        yield from _trees("draft-model", ("best-first", "sequoia"), options)


def _head(head: TrainedHead, options: SpaceOptions) -> Iterator[Family]:
    own = head.options
    max_tokens = head.max_chain or HEAD_SIZES[-1]
    if head.kind == ACCEPTANCE:
        yield Family.of("draft-model", CHAIN_SIZES, stop="acceptance", acceptance_head=head.folder)
    elif head.kind == EARLY_EXIT:
        yield Family.of(EARLY_EXIT, SLOW_SIZES, **own)
    elif head.kind == "medusa":
        yield from _chains("medusa", up_to(max_tokens), options, **own)
        yield from _planned_tree("medusa", options, **own)
    else:
        yield from _chains(head.kind, up_to(max_tokens), options, **own)
        if head.confidence:
            yield Family.of(head.kind, up_to(max_tokens), stop="confidence", **own)
        if head.kind != "mtp" or head.max_chain is None:  # layers that take turns draft chains
            yield from _trees(head.kind, ("best-first",), options, **own)


def _chains(
    drafter: str, sizes: Sequence[int], options: SpaceOptions, **part_options: Any
) -> Iterator[Family]:
    yield Family.of(drafter, sizes, **part_options)
    if options.is_sampled:
        yield Family.of(drafter, sizes, verifier="gumbel", **part_options)


def _trees(
    drafter: str, shapes: Iterable[str], options: SpaceOptions, **part_options: Any
) -> Iterator[Family]:
    """Placed in each of these shapes; sampled rows also drawn, and placed by the noise that they
    are verified with."""
    if not options.trees:
        return
    usually_drawn = options.temperature >= USUALLY_DRAWN
    sizes = _tree_sizes(options)
    for shape in shapes:
        yield Family.of(
            drafter,
            sizes,
            nested=False,
            tree=shape,
            **(PLACED if usually_drawn else {}),
            **part_options,
        )
    if options.is_sampled:
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


def _planned_tree(drafter: str, options: SpaceOptions, **part_options: Any) -> Iterator[Family]:
    """Medusa's own shape, planned by the accuracies of its heads."""
    if options.trees:
        sizes = _tree_sizes(options)
        yield Family.of(drafter, sizes, nested=False, tree="medusa", **part_options)
        if options.is_sampled:
            other = PLACED if options.temperature >= USUALLY_DRAWN else DRAWN
            yield Family.of(drafter, sizes, nested=False, tree="medusa", **other, **part_options)


def _composite(options: SpaceOptions) -> Iterator[Family]:
    """Look-up alongside the one that drafts from laws: the draft model, else the first head."""
    heads = [head for head in options.heads if head.kind not in (ACCEPTANCE, EARLY_EXIT)]
    sizes = _tree_sizes(options)
    if not options.trees:
        return
    if options.has_draft:
        yield Family.of("composite", sizes, nested=False, parts="draft-model,suffix")
    elif heads:
        head = heads[0]
        own = {"options": f"{head.kind}.head={head.folder}"} if head.folder else {}
        yield Family.of("composite", sizes, nested=False, parts=f"{head.kind},suffix", **own)


# ---------------------------------------------------------------- the others


def _model_free(options: SpaceOptions) -> Iterator[Family]:
    yield Family.of("ngram", LOOKUP_SIZES)
    yield Family.of("suffix", LOOKUP_SIZES)
    if options.trees:
        sizes = _tree_sizes(options)
        yield Family.of("ngram-cache", sizes, nested=False)
        yield Family.of("recycling", sizes, nested=False)
        yield Family.of("lookahead", (11,), nested=False)
    if options.corpus is not None:
        yield Family.of("retrieval", LOOKUP_SIZES, branches=1, corpus=options.corpus)


def _own_weights(options: SpaceOptions) -> Iterator[Family]:
    if options.own_weights:
        for layer in exit_layers(options.num_layers):
            yield Family.of(EARLY_EXIT, SLOW_SIZES, exit_layer=layer)
        for bits in BITS:
            yield Family.of("quantised", SLOW_SIZES, bits=bits)


def _when_named(names: Sequence[str], options: SpaceOptions) -> Iterator[Family]:
    """A family that the user named, with its own settings as they are; nothing for one that needs
    what is not there."""
    for name in names:
        if name in (PLAIN, "retrieval"):
            continue
        kind: type[Drafter] = DRAFTERS.load(name)
        required = kind.requirements(kind.Settings())
        if required.head or (required.draft and not options.has_draft):
            continue
        if (required.trees and not options.trees) or (required.module and not options.own_weights):
            continue
        if required.trees:
            yield Family.of(name, _tree_sizes(options), nested=False)
        else:
            yield Family.of(name, CHAIN_SIZES if required.draft else LOOKUP_SIZES)


def _tree_sizes(options: SpaceOptions) -> tuple[int, ...]:
    return WIDE_TREE_SIZES if options.on_accelerator else TREE_SIZES


def up_to(max_tokens: int) -> list[int]:
    """Lengths of chains of at most this many tokens."""
    return [*(size for size in (*HEAD_SIZES, *LONG_SIZES) if size < max_tokens), max_tokens]
