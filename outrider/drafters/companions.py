"""Companions: drafters that were published for a target. `--draft auto` takes one that is on this
machine and fits; `outrider ls drafters-for MODEL` lists them.

They are looked for in this order:

    the target's own checkpoint     an MTP head
    drafters.json                   our table of public targets and their drafters
    the hub, where it is in reach   drafters whose card names the target as `base_model`

Nothing is downloaded for the search. Whether a companion fits is told by the shapes in its headers,
of a model by its tokenizer, before any weight is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from outrider.drafters import DRAFTERS
from outrider.errors import CapabilityError, CheckpointError, OutriderError, first_line
from outrider.lazy import huggingface_hub
from outrider.models.heads.kinds import head_kind
from outrider.models.heads.mtp_files import ships_mtp
from outrider.models.heads.shipped import shipped_head
from outrider.models.heads.source import WEIGHT_FILES
from outrider.models.loading import hub
from outrider.models.loading.load import load_config, load_tokenizer
from outrider.models.source import ModelSource, resolve, weights_folder
from outrider.models.tokens.vocabulary import check_same_vocabulary
from outrider.wellformed import load_json

AUTO = "auto"  # what --draft names for the companion that is found
TABLE = Path(__file__).with_name("drafters.json")
MTP = "mtp"
MODEL = "draft-model"
KINDS = (
    "eagle",
    "eagle3",
    MTP,
    "medusa",
    "block",
    MODEL,
)  # drafters that --draft names something for
TAG = "speculative-decoding"  # of drafters on the hub
MAX_LISTED = 20  # models that the hub is asked for
# what the name or a tag of a model on the hub says of who drafts with it, the first that does
SIGNS = (
    ("eagle3", re.compile(r"eagle-?3|peagle", re.IGNORECASE)),
    ("eagle", re.compile(r"eagle", re.IGNORECASE)),
    ("block", re.compile(r"dflash|dspark", re.IGNORECASE)),
    ("medusa", re.compile(r"medusa", re.IGNORECASE)),
    (MTP, re.compile(r"\bmtp\b|-assistant\b", re.IGNORECASE)),
    (MODEL, re.compile(r"draft|\bpard\b", re.IGNORECASE)),
)
# the end of a name that says how weights are stored
STORED = re.compile(
    r"[-_.:](gguf|awq|gptq|bnb|fp8|nvfp4|mxfp4|nf4|[wa]\d+a\d+|(int|bf|f|fp)\d+|[48]-?bit|(ud-)?i?q\d\w*|dynamic)$",
    re.IGNORECASE,
)
HUB_ADDRESS = re.compile(r"https?://huggingface\.co/(?P<id>[\w.-]+/[\w.-]+)/?")
BASES = re.compile(r"general\.(repo_url|base_model\.\d+\.repo_url)")  # in a GGUF file's metadata


@dataclass(frozen=True)
class Companion:
    """A drafter that was published for a target."""

    target: str  # its hub id
    drafter: str  # as --draft takes it
    kind: str  # who drafts with it
    licence: str
    source: str  # the page that says so


@dataclass(frozen=True)
class Candidate:
    """A companion, and what is known of it on this machine."""

    companion: Companion
    folder: Path | None = None  # with its files; None: it would have to be downloaded
    kind: str = ""  # by its files, where they are here
    fit: str | None = None  # how it was found to fit
    misfit: str | None = None  # why it does not

    @property
    def fits(self) -> bool | None:
        """None: that cannot be known before it is here."""
        if self.misfit is not None:
            return False
        return None if self.fit is None else True


@dataclass(frozen=True)
class Choice:
    """The drafter that `--draft auto` takes, if any, and notes on the search."""

    draft: str | None = None  # a folder; None: the head in the target's checkpoint, or nothing
    kind: str | None = None  # who drafts with it; None: nothing was found
    notes: tuple[str, ...] = ()


@cache
def published() -> tuple[Companion, ...]:
    """The table, of each target what is to be taken first before the others."""
    return tuple(Companion(**entry) for entry in load_json(TABLE))


class Target:
    """A target as far as its companions are concerned."""

    def __init__(
        self,
        name: str,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        fetches: bool = True,
    ) -> None:
        """`fetches`: config and tokenizer of one on the hub come here."""
        self.name = name
        self._trusts = trust_remote_code
        try:
            self.source = resolve(name, revision, fetches=fetches)
        except OutriderError:
            if fetches or Path(name).exists():
                raise
            self.source = ModelSource(name, revision)  # a GGUF file that is on the hub alone

    @property
    def is_here(self) -> bool:
        """Whether its config can be read without a download."""
        weights = self.source.weights
        return weights.gguf is not None or weights.folder is not None

    @cached_property
    def config(self) -> Any:
        return load_config(self.source, self._trusts)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.source, self._trusts)

    @cached_property
    def ids(self) -> list[str]:
        """Its names on the hub, as far as its own name or its files tell."""
        weights = self.source.weights
        found = [name.partition(":")[0] for name in (self.name, weights.name)]
        found = [name for name in found if not Path(name).exists()]
        if weights.gguf is not None:
            metadata = weights.gguf.metadata
            found += [str(value) for key, value in metadata.items() if BASES.fullmatch(key)]
        elif weights.folder is not None:
            found.append(hub.repository_of(weights.folder) or "")
        named = [
            address["id"] if (address := HUB_ADDRESS.fullmatch(name)) else name for name in found
        ]
        return [
            name
            for name in dict.fromkeys(named)
            if hub.REPOSITORY.fullmatch(name) and name[0].isalnum()
        ]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names by which the table may know it: without owners, and without how weights are
        stored."""
        weights = self.source.weights
        paths = [path for path in (weights.folder, weights.gguf and weights.gguf.path) if path]
        return frozenset(map(_bare, [*self.ids, *(path.absolute().name for path in paths)]))


def choose_companion(
    target: Target, kinds: Collection[str] = KINDS, *, device: str = "cpu"
) -> Choice:
    """The companion of one of these kinds that is here and fits, or what there would be to
    download. Raises what reading the target's config raises."""
    if MTP in kinds and ships_mtp(target.name, device):
        return Choice(
            kind=MTP, notes=("--draft auto: the MTP head in the target's checkpoint drafts",)
        )
    notes: list[str] = []
    absent: list[Companion] = []
    is_known = False
    for candidate in candidates(target, notes):
        companion = candidate.companion
        if (candidate.kind or companion.kind) not in kinds:
            continue
        is_known = True
        if candidate.fits:
            facts = f"{candidate.kind}, licence {companion.licence}; {companion.source}"
            took = f"--draft auto: {companion.drafter} drafts ({facts}): it is on this machine, and {candidate.fit}"
            return Choice(str(candidate.folder), candidate.kind, (*notes, took))
        if candidate.misfit is not None:
            notes.append(f"--draft auto left {companion.drafter} aside: {candidate.misfit}")
        else:
            absent.append(companion)
    if absent:
        first = absent[0]
        more = (
            f"; {len(absent) - 1} more: outrider ls drafters-for {target.name}"
            if absent[1:]
            else ""
        )
        notes.append(
            f"--draft auto downloads nothing: --draft {first.drafter} fetches a drafter of this target "
            f"({first.kind}, licence {first.licence}){more}"
        )
    elif not is_known:
        of_kind = "" if len(kinds) == len(KINDS) else f" of kind {' or '.join(kinds)}"
        notes.append(f"--draft auto: no drafter{of_kind} is known for '{target.name}'")
    return Choice(notes=tuple(notes))


def candidates(target: Target, notes: list[str]) -> Iterator[Candidate]:
    """The companions of a target in the order in which they are to be taken, those that the hub
    alone knows last. `notes` gets a line where the hub cannot be asked."""
    listed = _listed(target)
    seen = set()
    for entry in listed:
        seen.add(entry.drafter)
        yield _candidate(entry, target)
    for entry in _on_hub([*target.ids, *(entry.target for entry in listed[:1])], notes):
        if entry.drafter not in seen:
            seen.add(entry.drafter)
            yield _candidate(entry, target)


def offer(name: str) -> str | None:
    """One line about the companion of a target that nobody asked for: None where the table knows
    none, or none that fits. No weight is read, and the hub is not asked.

    Heads that come along are not offered for GGUF files: passes of a small model in 4 bits cost too
    little for them (docs/results/real-model.md)."""
    try:
        target = Target(name, fetches=False)
        listed = [_candidate(entry, target) for entry in _listed(target)]
    except OutriderError:  # whoever loaded the target has said so
        return None
    if target.source.weights.gguf is not None:
        listed = [one for one in listed if shipped_head(one.companion.drafter) is None]
    here = next((one.companion.drafter for one in listed if one.fits), None)
    if here is not None:
        return f"{here} is here and drafts for this model: --draft auto"
    absent = next((one.companion.drafter for one in listed if one.folder is None), None)
    if absent is None:
        return None
    return f"{absent} drafts for this model: --draft {absent} (a download)"


def _listed(target: Target) -> list[Companion]:
    return [entry for entry in published() if _bare(entry.target) in target.names]


def _candidate(companion: Companion, target: Target) -> Candidate:
    folder = _folder(companion.drafter)
    if folder is None:
        return Candidate(companion)
    if target.is_here:
        _ = target.config  # raises what is wrong with the target itself
    kind = ""
    try:
        source = resolve(str(folder), fetches=False)
        kind = head_kind(source) or MODEL
        if kind != companion.kind and MODEL in (kind, companion.kind):
            raise CheckpointError(f"it was published as {companion.kind}, and its files are {kind}")
        fit = _fit(kind, source, target) if target.is_here else None
    except OutriderError as error:
        return Candidate(companion, folder, kind, misfit=str(error))
    except Exception as error:  # noqa: BLE001  whatever a stranger's files hold
        why = f"its files cannot be read ({type(error).__name__}: {first_line(error)})"
        return Candidate(companion, folder, kind, misfit=why)
    return Candidate(companion, folder, kind, fit=fit)


def _fit(kind: str, source: ModelSource, target: Target) -> str:
    """How a companion fits. Raises CheckpointError, CapabilityError where it does not."""
    if kind != MODEL:
        if kind not in KINDS:
            raise CapabilityError(f"it is a head of another kind ({kind})")
        config = target.config
        DRAFTERS.load(kind).weigh_head(source.name, config, torch.bfloat16)
        return "the shapes of its weights fit"
    load_config(source)
    if _digest(source) is not None and _digest(source) == _digest(target.source):
        return "its tokenizer is the target's"
    check_same_vocabulary(
        target.tokenizer, load_tokenizer(source), target.name, source.name, may_lack=True
    )
    return "its tokens are the target's"


def _digest(source: ModelSource) -> str | None:
    """A hash of the tokenizer's file; None where there is no such file."""
    folder = source.with_tokenizer.folder
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        return None
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _folder(name: str) -> Path | None:
    """The folder with the files of a drafter that is whole on this machine: by this path, with
    Outrider, or in the hub's cache."""
    path = shipped_head(name) or Path(name)
    if not path.is_dir():
        try:
            path = hub.cached_snapshot(name, None)
        except Exception:  # noqa: BLE001  of the hub's own kinds
            return None
    if (path / "tokenizer.json").exists() or (path / "model.safetensors.index.json").exists():
        return weights_folder(ModelSource(str(path), folder=path), fetches=False)
    return path if any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES) else None


def _on_hub(ids: Iterable[str], notes: list[str]) -> Iterator[Companion]:
    """Drafters on the hub whose `base_model` has one of these names, or is what the first of them
    was made of."""
    ids = list(dict.fromkeys(ids))
    if not ids:
        return
    if hub.only_cached(ids[0]):
        notes.append("the hub is out of reach, so it was not asked for more drafters")
        return
    try:
        api = huggingface_hub.HfApi()
        for name in dict.fromkeys([*ids, *_bases(api, ids[0])]):
            for found in api.list_models(filter=[f"base_model:{name}", TAG], limit=MAX_LISTED):
                tags = [tag for tag in found.tags or () if isinstance(tag, str)]
                text = (
                    f"{found.id} {' '.join(tag for tag in tags if ':' not in tag and tag != TAG)}"
                )
                kind = next((kind for kind, sign in SIGNS if sign.search(text)), None)
                if kind is None or not hub.REPOSITORY.fullmatch(found.id):
                    continue
                licence = next(
                    (tag.partition(":")[2] for tag in tags if tag.startswith("license:")), "unknown"
                )
                page = f"{huggingface_hub.constants.ENDPOINT}/{found.id}"
                yield Companion(name, found.id, kind, licence, page)
    except Exception as error:  # noqa: BLE001  of any HTTP library, and of the hub's own kinds
        notes.append(f"the hub did not say which drafters it has ({type(error).__name__})")


def _bases(api: Any, name: str) -> list[str]:
    """The models that one on the hub was made of, by its card."""
    card = api.model_info(name, timeout=hub.PATIENCE_S).card_data
    named = getattr(card, "base_model", None)
    named = [named] if isinstance(named, str) else named
    return [one for one in named or () if isinstance(one, str) and hub.REPOSITORY.fullmatch(one)]


def _bare(name: str) -> str:
    """A model's name without its owner, a file's ending, and how its weights are stored."""
    bare = name.rpartition("/")[2].removesuffix(".gguf")
    while (shorter := STORED.sub("", bare)) != bare:
        bare = shorter
    return bare.lower().removeprefix("meta-")
