"""The files that a model's name means: a name becomes a source once, before anything of the model
is read.

    /models/llama                 a folder with a checkpoint of transformers
    USER/REPO                     one on the hub
    /models/adapter               a folder with an adapter, which is merged into its base
    /models/model.gguf, USER/REPO:Q4_K_M, ...     a GGUF file (all forms: `gguf/names.py`)

Code that reads a model is handed its source, and looks at no name again to learn what it means.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.errors import CheckpointError, first_line
from outrider.lazy import huggingface_hub
from outrider.models.gguf.header import GgufFile
from outrider.models.gguf.names import gguf_in
from outrider.models.loading import hub
from outrider.models.loading.adapter import Adapter, adapter_in
from outrider.models.loading.weight_files import weight_files

WEIGHT_PATTERNS = ["*.json", "*.safetensors"]  # of the files that are fetched from the hub


@dataclass(frozen=True)
class ModelSource:
    """The files of one model: of which format they are, and where."""

    name: str  # as it was given; of a GGUF file on the hub the path in the cache, once it is there
    revision: str | None = None  # of a model on the hub
    # with the checkpoint's files on this machine; of one on the hub, its snapshot in the cache
    folder: Path | None = None
    gguf: GgufFile | None = None
    adapter: Adapter | None = None
    base: ModelSource | None = None  # the model that the adapter changes

    @property
    def is_local(self) -> bool:
        """Whether the name means a file or a folder of this machine."""
        return self.gguf is not None or Path(self.name).expanduser().exists()

    @property
    def weights(self) -> ModelSource:
        """The source of the weights: of an adapter its base."""
        return self if self.base is None else self.base.weights

    @property
    def with_tokenizer(self) -> ModelSource:
        """The source of the tokenizer: an adapter's own folder where it has one, otherwise its
        base."""
        if self.base is None or self.adapter is None or self.adapter.has_tokenizer:
            return self
        return self.base.with_tokenizer


def resolve(name: str, revision: str | None = None, *, fetches: bool = True) -> ModelSource:
    """The source that a name means.

    `fetches`: what is on the hub alone comes here; a GGUF file whole, of another checkpoint its
    config.

    Raises CheckpointError for a GGUF file that is missing, ambiguous or damaged and for a damaged
    adapter, CapabilityError for those that cannot run.
    """
    if name.startswith("~"):
        name = str(Path(name).expanduser())
    adapter = adapter_in(name)
    if adapter is not None:
        base = resolve(adapter.base, adapter.revision, fetches=fetches)
        return ModelSource(name, folder=adapter.folder, adapter=adapter, base=base)
    file = gguf_in(name, revision, fetches=fetches)
    if file is not None:
        local = Path(name).expanduser().exists()
        return ModelSource(name if local else str(file.path), gguf=file)
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelSource(name, folder=path)
    return ModelSource(name, revision, folder=hub.snapshot_of(name, revision, fetches=fetches))


def weights_folder(source: ModelSource, *, fetches: bool = True) -> Path | None:
    """The folder with the safetensors files of a checkpoint, an adapter's base included; None for
    one that is on the hub alone.

    `fetches`: they come here. Raises CheckpointError where they cannot, or there are none.
    """
    weights = source.weights
    folder = weights.folder
    if Path(weights.name).expanduser().is_file():
        raise CheckpointError(
            f"'{source.name}' is a single file; weights are read from folders of safetensors and "
            "GGUF files."
        )
    try:
        if folder is None or not Path(weights.name).expanduser().is_dir():
            offline = not fetches or hub.only_cached(weights.name)
            folder = Path(
                huggingface_hub.snapshot_download(
                    weights.name,
                    revision=weights.revision,
                    allow_patterns=WEIGHT_PATTERNS,
                    local_files_only=offline,
                )
            )
            weight_files(folder)
    except Exception as error:
        if fetches:
            raise CheckpointError(
                f"cannot read the weights of '{source.name}': {first_line(error)}"
            ) from error
        return None
    return folder
