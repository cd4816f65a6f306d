"""Keys and values of texts seen before, in pages, for prompts that begin like them.

    root -- [page: tokens 0..P) -- [page: P..2P) -- ...        a tree: texts that begin alike share pages
                                \\- [page: other tokens]

A row reads its keys as one contiguous stretch (`cache.py`): that is what attention kernels are fast
on, and what keeps a row's arithmetic apart from its neighbours'. So pages are copied into a row
when it joins and out of it when it leaves: two copies at memory speed for each reused token,
against a pass through the model. A page is found by the tokens themselves, not by a hash, and only
by tokens that were returned (never by a rejected draft's).

Layers with windows have lost the beginning of a long row (`cache.py`); pages that are saved then
hold zeros of these layers. So a text continues only where the last pages, as many as windows reach,
are whole. Those of a prompt are: it is saved chunk by chunk.

Least recently used leaves go first when all pages are taken. Idea of the tree: RadixAttention
(Zheng et al. 2312.07104).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.kv.cache import KEPT_BACK, KVCache, LayerShape


@dataclass(eq=False)
class _Page:
    """A node of the tree. `index` is its index in the stores; -1 for the root, which holds nothing."""

    parent: _Page | None
    tokens: tuple[int, ...]
    index: int
    is_whole: bool  # layers with windows have it, too
    children: dict[tuple[int, ...], _Page] = field(default_factory=dict)


class PagePool:
    """Keys and values of texts seen before, in pages. `num_pages` 0: nothing is kept."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        page: int,
        num_pages: int,
    ) -> None:
        self.page = page  # tokens
        self.num_pages = num_pages
        self._device = torch.device(device)
        self.queries = self.hits = 0  # prompt tokens looked up, and found
        self._windowed = [shape.window is not None for shape in layers] * 2  # of each store
        self._held = max(
            (shape.window + KEPT_BACK for shape in layers if shape.window is not None), default=0
        )
        sizes = [(s.num_kv_heads, s.key_size) for s in layers] + [
            (s.num_kv_heads, s.stored_value_size) for s in layers
        ]
        self._stores = [
            torch.empty(num_pages, page, heads, size, dtype=dtype, device=device)
            for heads, size in sizes
        ]
        self.clear()

    @property
    def used(self) -> int:
        """Pages in use."""
        return self.num_pages - len(self._free)

    def known(self, tokens: Sequence[int]) -> int:
        """Tokens that `load` would fill in."""
        return len(self._usable(tokens)) * self.page

    def load(
        self, tokens: Sequence[int], cache: KVCache, row: int, max_length: int | None = None
    ) -> int:
        """Fill an empty row with the longest known beginning of `tokens`, at most `max_length`;
        returns its number of tokens."""
        path = self._usable(tokens[:max_length])
        self._touch(path)
        self.queries += len(tokens)
        self.hits += len(path) * self.page
        for number, page in enumerate(path):
            cache.put(row, number * self.page, [store[page.index] for store in self._stores])
        return len(path) * self.page

    def copy(self, tokens: Sequence[int]) -> list[Tensor]:
        """The longest known beginning of `tokens`, as `KVCache.read` gives it; of 0 positions where
        nothing is known."""
        path = self._usable(tokens)
        self._touch(path)
        indices = torch.tensor(
            [page.index for page in path], dtype=torch.int64, device=self._device
        )
        return [store[indices].flatten(0, 1) for store in self._stores]

    @torch.inference_mode()
    def save(self, tokens: Sequence[int], cache: KVCache, row: int, length: int) -> None:
        """Keep the whole pages of a row's first `length` committed positions; `tokens` are what
        they hold."""
        path = self._match(tokens[:length])
        self._touch(path)  # at once: they must not be in the way as the oldest ones
        first = 0 if cache.window is None else cache.firsts[row]  # of what layers with windows hold
        for number, page in enumerate(path):
            if not page.is_whole and number * self.page >= first:
                page.is_whole = True
                self._fill(page, cache, row, number * self.page)
        for start in range(len(path) * self.page, length - self.page + 1, self.page):
            index = self._free_index(path)
            if index is None:
                break
            parent = path[-1] if path else self._root
            # one that lacks a few positions would do, too: `_held` is KEPT_BACK more than windows
            # reach
            page = _Page(
                parent, tuple(tokens[start : start + self.page]), index, is_whole=start >= first
            )
            self._fill(page, cache, row, start)
            parent.children[page.tokens] = page
            path.append(page)
        self._touch(path)

    def clear(self) -> None:
        """Forget everything: after numbers that are none, nobody knows which page has them."""
        self._root = _Page(None, (), -1, is_whole=True)
        self._free = list(range(self.num_pages))[::-1]
        # least recently used first; a page stands after its children
        self._order: OrderedDict[_Page, None] = OrderedDict()

    def check_integrity(self) -> None:
        """Raise AssertionError when a page is lost, or under two indices. For tests and idle
        moments."""
        pages = []
        stack = list(self._root.children.values())
        while stack:
            pages.append(stack.pop())
            stack.extend(pages[-1].children.values())
        indices = [page.index for page in pages]
        assert sorted(indices + self._free) == list(range(self.num_pages)), (
            "pages are lost, or free and in use at once"
        )
        assert set(pages) == set(self._order), (
            "the order of use has forgotten pages, or knows dropped ones"
        )

    def _fill(self, page: _Page, cache: KVCache, row: int, start: int) -> None:
        for store, source, begin, windowed in zip(
            self._stores,
            (*cache.keys, *cache.values),
            cache.begins(row),
            self._windowed,
            strict=True,
        ):
            lacks = windowed and not page.is_whole
            store[page.index] = (
                0 if lacks else source[row, start - begin : start - begin + self.page]
            )

    def _usable(self, tokens: Sequence[int]) -> list[_Page]:
        """The longest known beginning that a text can continue after."""
        path = self._match(tokens)
        count = whole = 0  # pages of the beginning, and those that end it without a gap
        for number, page in enumerate(path, start=1):
            whole = whole + 1 if page.is_whole else 0
            if whole == number or whole * self.page >= self._held:
                count = number
        return path[:count]

    def _match(self, tokens: Sequence[int]) -> list[_Page]:
        path = []
        page = self._root
        for start in range(0, len(tokens) - self.page + 1, self.page):
            child = page.children.get(tuple(tokens[start : start + self.page]))
            if child is None:
                break
            path.append(child)
            page = child
        return path

    def _touch(self, path: Sequence[_Page]) -> None:
        # children first, so that the first of the order is always a leaf
        for page in reversed(path):
            self._order[page] = None
            self._order.move_to_end(page)

    def _free_index(self, path: Sequence[_Page]) -> int | None:
        """A free index, made by dropping the least recently used leaf if need be; None when only
        `path` could go."""
        if not self._free:
            oldest = next(iter(self._order), None)
            if oldest is None or oldest in path:
                return None
            assert oldest.parent is not None
            del self._order[oldest], oldest.parent.children[oldest.tokens]
            self._free.append(oldest.index)
        return self._free.pop()
