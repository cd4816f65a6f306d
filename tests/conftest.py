"""What every test may count on: no network, folders of this run instead of the user's, and where
real models lie.

`../shared` holds real checkpoints beside the repository (`OUTRIDER_SHARED` names another folder).
Tests that need them skip where they are absent; nothing is ever downloaded.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it tells of every connection that a test cuts

import pytest
from hypothesis import settings

# how long an example takes is the machine's business
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

REPOSITORY = Path(__file__).resolve().parent.parent
# this run's cache folder: set by the first process, found by workers and by tests that run pytest
CACHE = "OUTRIDER_TEST_CACHE"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here and not in `contract/`, which pytest does not read before the command line."""
    parser.addoption(
        "--drafters",
        metavar="NAMES",
        help="of the drafters' contract, the cases of these alone: none,ngram",
    )
    parser.addoption("--renew-golden", action="store_true", help="write the golden reports anew")


@pytest.fixture
def renew_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written instead of compared."""
    return bool(request.config.getoption("--renew-golden"))


def pytest_configure(config: pytest.Config) -> None:
    """Give this run its cache folder, and its signals as a terminal gives them.

    A shell's background job begins with Ctrl-C ignored, one under `nohup` with hang-ups ignored,
    and both are inherited: tests that interrupt themselves or a program of ours would wait for
    ever."""
    if CACHE not in os.environ:
        os.environ[CACHE] = tempfile.mkdtemp(prefix="outrider-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(CACHE), ignore_errors=True))
    os.environ["OUTRIDER_CACHE"] = os.environ[CACHE]
    os.environ["XDG_STATE_HOME"] = os.environ[CACHE]
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """What was imported and collected, some 400,000 objects, stays to the end: looking through it
    again and again took a quarter of the time of tests that pass much through Python."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def _threads_of_a_module() -> Iterator[None]:
    yield from _threads_as_before()


@pytest.fixture(autouse=True)
def _threads_of_a_test(_threads_of_a_module: None) -> Iterator[None]:
    yield from _threads_as_before()


def _threads_as_before() -> Iterator[None]:
    """Two threads that one test gave torch would be the threads of all tests after it, and with a
    worker on each processor they mostly wait for one another, spinning: thirty times the processor
    seconds."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared models and data."""
    folder = Path(os.environ.get("OUTRIDER_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared folder at {folder} (set OUTRIDER_SHARED)")
    return folder


@pytest.fixture(scope="session")
def stories(shared: Path) -> Path:
    """A real 260k-parameter Llama."""
    return _model(shared / "models" / "stories260K")


@pytest.fixture(scope="session")
def smollm(shared: Path) -> Path:
    """A real published model's folder: SmolLM2-135M-Instruct in one GGUF file, Q4_1."""
    folder = shared / "models" / "smollm2-135m-instruct"
    if next(folder.glob("*.gguf"), None) is None:
        pytest.skip(f"no GGUF file in {folder}")
    return folder


@pytest.fixture(scope="session")
def pair(shared: Path) -> tuple[Path, Path]:
    """Target (14M) and draft (1.2M) of one vocabulary."""
    folder = shared / "models" / "pair-14M"
    return _model(folder / "target"), _model(folder / "draft")


def _model(folder: Path) -> Path:
    if not (folder / "config.json").exists():
        pytest.skip(f"no model at {folder}")
    return folder
