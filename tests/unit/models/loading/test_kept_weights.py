"""Files of weights give back every bit, mapped or copied, and nothing else."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.cache import keep_json, kept_json
from outrider.huge_pages import HUGE, LINE
from outrider.models.loading import kept_weights as module
from outrider.models.loading.kept_weights import (
    SUFFIX,
    is_mapped_huge,
    keep_weights,
    keep_written,
    kept_weights,
    unthrottled_bytes,
    writing_weights,
)

KEY = "a start"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "weights" / f"model{SUFFIX}"


@pytest.fixture(params=["mapped", "copied"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a system says that keeps files in huge pages, or does not."""
    steps = iter(range(0, 1 << 50, 1 << 40)) if request.param == "mapped" else None
    monkeypatch.setattr(module, "_huge_bytes", lambda: 0 if steps is None else next(steps))
    monkeypatch.setattr(module, "is_local", lambda folder: True)
    return str(request.param)


def some() -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)
    return {
        "bytes": torch.randint(0, 256, (3 * HUGE + 17,), generator=dice, dtype=torch.uint8),
        "few": torch.arange(11, dtype=torch.uint8),
        "none": torch.empty(0, 3),
        "bf16": torch.randn(40, 10, generator=dice).bfloat16(),
        "transposed": torch.randn(30, 7, generator=dice).t(),
        "many": torch.randint(-9, 9, (1025, 1024), generator=dice, dtype=torch.int16),
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
        assert found[name].data_ptr() % LINE == 0


def is_mapped(tensor: Tensor, file: Path) -> bool:
    """Whether a tensor lies in a mapping of the file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return str(file) in line
    return False


def test_tensors_come_back(file: Path, either_way: str) -> None:
    keep_weights(file, KEY, some())
    kept = kept_weights(file, KEY)
    assert_equal(kept, some())
    if Path("/proc/self/maps").exists():
        assert is_mapped(kept["bytes"], file) == (either_way == "mapped")
    assert kept_weights(file, "another start") == {}


@pytest.mark.parametrize("size", [61, 4096, HUGE - 3, HUGE, 2 * HUGE + 5])
def test_tensors_may_be_given_in_parts(size: int, file: Path, either_way: str) -> None:
    """Catches bytes that get lost, doubled or exchanged at the border of a page."""
    tensors = some()
    with writing_weights(file, 0) as writing:
        for name, tensor in tensors.items():
            parts = tensor.contiguous().view(-1).view(torch.uint8).split(size)
            writing.add(name, tensor.dtype, tensor.shape, parts)
    assert_equal(keep_written(file, KEY, writing), tensors)
    assert_equal(kept_weights(file, KEY), tensors)


def test_another_process_may_put_its_file_into_the_place(file: Path, either_way: str) -> None:
    """Two that start one model at once keep other tensors first. Catches weights that are read from
    the other one's file."""
    tensors = some()
    with writing_weights(file, 0) as writing:
        for name, tensor in tensors.items():
            writing.add(name, tensor.dtype, tensor.shape, [tensor])
    with writing_weights(file, 0) as other:
        for name in reversed(tensors):
            other.add(name, tensors[name].dtype, tensors[name].shape, [tensors[name]])
    assert_equal(keep_written(file, KEY, writing), tensors)
    assert kept_weights(file, KEY) == {}
    assert_equal(keep_written(file, KEY, other), tensors)
    assert_equal(kept_weights(file, KEY), tensors)


def _change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(content)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4096])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [_change, _cut, _empty, Path.unlink])
def test_a_damaged_file_gives_nothing(damage: Callable[[Path], object], file: Path) -> None:
    """Also where size and time are those of the file that was kept."""
    keep_weights(file, KEY, some())
    state = file.stat()
    damage(file)
    if file.exists():
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert kept_weights(file, KEY) == {}
    keep_weights(file, KEY, some())
    assert_equal(kept_weights(file, KEY), some())


@pytest.mark.parametrize(
    "place",
    [
        [1 << 60, "uint8", [11], 0],
        [-64, "uint8", [11], 0],
        [3, "uint8", [11], 0],
        [0, "uint8", [1 << 60, 1 << 60], 0],
        [0, "uint8", [-1, -1], 0],
        [0, "nn", [11], 0],
        [0, "uint8", [11.0], 0],
        [0, "uint8", [11], "0"],
        [0, "uint8"],
        None,
    ],
    ids=json.dumps,
)
def test_a_table_that_says_anything_gives_nothing(place: object, file: Path) -> None:
    """Its sum can be right: whoever changes the table can make one."""
    keep_weights(file, KEY, some())
    table = file.with_suffix(".json")
    content = kept_json(table)
    keep_json(table, {**content, "tensors": {"few": place}}, max_files=9)
    assert kept_weights(file, KEY) == {}


def test_files_that_take_too_much_room_go_or_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.arange(2000, dtype=torch.uint8)}
    old, new = (tmp_path / f"{name}{SUFFIX}" for name in ("old", "new"))
    for limit, value in (("MAX_BYTES", 3000), ("MAX_FILES", 1)):
        with monkeypatch.context() as patched:
            patched.setattr(module, limit, value)
            keep_weights(old, KEY, tensors)
            os.utime(old, (1, 1))
            keep_weights(new, KEY, tensors)
            assert not kept_weights(old, KEY)
            assert_equal(kept_weights(new, KEY), tensors)
            assert {file.stem for file in tmp_path.iterdir()} == {"new"}
    monkeypatch.setattr(module, "MAX_BYTES", 1999)
    with pytest.raises(OSError, match="too many"):
        keep_weights(new, KEY, tensors)


def test_all_files_together_take_a_share_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches files each of which is small against the disk, and which fill it one by one."""
    tensors = {"a": torch.ones(1 << 20, dtype=torch.uint8)}
    files = [tmp_path / f"{number}{SUFFIX}" for number in range(8)]

    def usage(folder: Path) -> object:
        used = sum(file.stat().st_size for file in tmp_path.iterdir())
        return type("usage", (), {"free": (10 << 20) - used})

    monkeypatch.setattr("shutil.disk_usage", usage)
    for age, file in enumerate(files):
        keep_weights(file, KEY, tensors)
        os.utime(file, (age, age))
    assert [file for file in files if file.exists()] == files[-2:]


def test_what_fails_leaves_nothing(file: Path) -> None:
    def parts() -> Iterator[Tensor]:
        yield torch.zeros(3 * HUGE, dtype=torch.uint8)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"), writing_weights(file, 0) as writing:
        writing.add("a", torch.uint8, (4 * HUGE,), parts())
    assert not [*file.parent.iterdir()]


def test_writing_ends_where_linux_would_make_a_process_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle between the two limits, less what is not on the disk yet."""
    facts = (
        "nr_free_pages 7\nnr_dirty {}\nnr_dirty_threshold 300\nnr_dirty_background_threshold 100"
    )
    for dirty, pages in ((20, 180), (250, 0)):
        monkeypatch.setattr(Path, "read_text", lambda self, dirty=dirty: facts.format(dirty))
        assert unthrottled_bytes() == pages * mmap.PAGESIZE


def test_a_system_without_facts_maps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS and Windows have no such files, and some containers hide them."""

    def absent(*unused: object, **also: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert unthrottled_bytes() == 0


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"/": "ext4"}, True),
        ({"/": "ext4", "{folder}": "nfs4"}, False),
        ({"/": "nfs4", "{folder}": "xfs"}, True),
        ({"/": "ext4", "{folder}/deeper": "nfs4"}, True),
        ({"/": "fuse.sshfs"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_folder_of_a_network_is_known(
    kinds: dict[str, str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that another machine removes ends the process that has it mapped."""

    class Mount(NamedTuple):
        mountpoint: str
        fstype: str

    folder = str(tmp_path.resolve())
    mounts = [Mount(place.format(folder=folder), kind) for place, kind in kinds.items()]
    monkeypatch.setattr("psutil.disk_partitions", lambda **unused: mounts)
    assert module.is_local(tmp_path / "weights") == expected


def test_no_mapped_file_is_one_of_a_network(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(0, 1 << 50, 1 << 40))
    monkeypatch.setattr(module, "_huge_bytes", lambda: next(steps))
    monkeypatch.setattr(module, "is_local", lambda folder: False)
    keep_weights(file, KEY, some())
    kept = kept_weights(file, KEY)
    assert_equal(kept, some())
    if Path("/proc/self/maps").exists():
        assert not is_mapped(kept["bytes"], file)
    assert not is_mapped_huge(file.parent)


def test_the_small_file_is_mapped_while_pages_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a mapping that is gone before: then no system would keep files in huge pages."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("another system")

    def mapped_bytes() -> int:
        lines = [line for line in maps.read_text().splitlines() if str(tmp_path) in line]
        ranges = [line.split()[0].split("-") for line in lines]
        return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)

    monkeypatch.setattr(module, "_huge_bytes", mapped_bytes)
    monkeypatch.setattr(module, "is_local", lambda folder: True)
    is_mapped_huge.cache_clear()
    assert is_mapped_huge(tmp_path / "weights")


def test_no_folder_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    assert not is_mapped_huge(tmp_path / "weights")
