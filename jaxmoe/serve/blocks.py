# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Pool of the pages that hold keys and values: reference counts, prefix sharing, eviction.

A page holds G tokens. A full page has a name, `blake2b(name of the page before, tokens)`; the name
before the first page is made of adapter and salt, so that neither adapters nor tenants share. A
named page that no sequence holds stays until it is taken: pages without a name are taken first,
then named ones, the least recently used first. A sequence gives its pages back last first, so
that the end of a chain is evicted before its beginning. With groups the same order holds of groups
whose pages are all free, and single pages are taken when no such group is left.

Invariants, which `check` asserts:

- a page is either free or referenced, and the references are those of the tables of pages;
- names and named pages are in bijection.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import hashlib
from collections.abc import Container, Iterable, Iterator, Sequence


def root_name(adapter: str = "", salt: str = "") -> bytes:
    """Return the name before the first page.

    Args:
        adapter: Adapter that computes the pages.
        salt: Tenant.
    """
    text = f"{len(adapter)}:{adapter}{salt}".encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def page_names(parent: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Return the names of the full pages of some tokens, a chain.

    Args:
        parent: Name of the page before them, or `root_name`.
        tokens: Tokens; those behind the last full page have no name.
        page_size: Tokens of a page.
    """
    contents = array.array("q", tokens)
    size = page_size * contents.itemsize
    content = contents.tobytes()
    names: list[bytes] = []
    for begin in range(0, len(content) - size + 1, size):
        parent = hashlib.blake2b(parent + content[begin : begin + size], digest_size=16).digest()
        names.append(parent)
    return names


def num_pages(num_tokens: int, page_size: int) -> int:
    """Return the pages that hold a number of tokens."""
    return -(-num_tokens // page_size)


class HostCopies:
    """Names of the pages of which host memory has a copy, the least recently used first."""

    def __init__(self, size: int):
        self.size = size
        """Pages at most; 0 keeps none."""
        self._names: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def keep(self, names: Sequence[bytes]) -> tuple[int, tuple[bytes, ...]]:
        """Note that a chain is copied.

        Args:
            names: Names of the full pages of a sequence, the first page first.

        Returns:
            How many of its first pages were there already, and the names whose copies are dropped
            for it, which may be its own.
        """
        num_kept = next((i for i, name in enumerate(names) if name not in self._names), len(names))
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        dropped = []
        while len(self._names) > self.size:
            dropped.append(self._names.popitem(last=False)[0])
        return num_kept, tuple(dropped)


@dataclasses.dataclass(slots=True)
class _Groups:
    """Pages in groups side by side, and which groups are free as a whole.

    The pages of a rest that fills no group belong to none.
    """

    size: int
    """Pages of a group."""
    free: list[int]
    """Free pages of each group."""
    blank: collections.OrderedDict[int, None]
    """Groups whose pages are all free and have no name."""
    cached: collections.OrderedDict[int, None]
    """Groups whose pages are all free, the least recently given back first."""

    @classmethod
    def of(cls, pages: int, size: int) -> _Groups:
        """Return the groups of a blank pool."""
        count = pages // size
        blank = collections.OrderedDict.fromkeys(range(count))
        return cls(size, [size] * count, blank, collections.OrderedDict())

    def use(self, page: int) -> None:
        """Note that a page is not free any more."""
        if (group := page // self.size) < len(self.free):
            self.free[group] -= 1
            self.blank.pop(group, None)
            self.cached.pop(group, None)

    def give(self, page: int, blank: Container[int]) -> None:
        """Note that a page is free."""
        if (group := page // self.size) < len(self.free):
            self.free[group] += 1
            if self.free[group] == self.size:
                pages = range(group * self.size, (group + 1) * self.size)
                (self.blank if all(p in blank for p in pages) else self.cached)[group] = None

    def demote(self, page: int) -> None:
        """Let the group of a page be taken first among those with names."""
        if (group := page // self.size) in self.cached:
            self.cached.move_to_end(group, last=False)

    def forget(self) -> None:
        """Note that no page has a name."""
        self.blank.update(self.cached)
        self.cached.clear()


class BlockPool:
    """Pages 0 to `size - 1`; a sequence's table is a list of them."""

    def __init__(self, size: int, page_size: int, group: int = 1):
        """Make a pool of blank pages.

        Args:
            size: Pages.
            page_size: Tokens of a page.
            group: Pages side by side that are taken for one sequence while there are such; for
                them cached pages are evicted in whole groups.
        """
        if size < 1 or page_size < 1:
            raise ValueError(f"pages={size} of page_size={page_size} tokens must both be positive")
        self.size = size
        self.page_size = page_size
        self._references = [0] * size
        self._names: list[bytes | None] = [None] * size
        self._page_of: dict[bytes, int] = {}
        self._blank: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._blank.update(dict.fromkeys(range(size)))
        self._groups = _Groups.of(size, group) if group > 1 else None

    @property
    def num_free(self) -> int:
        """Pages that no sequence holds, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that no sequence holds and that have a name."""
        return len(self._cached)

    def references(self, page: int) -> int:
        """Return how many tables hold a page."""
        return self._references[page]

    def is_writable(self, page: int) -> bool:
        """Return whether one table holds the page and it has no name."""
        return self._references[page] == 1 and self._names[page] is None

    def find(self, names: Iterable[bytes]) -> tuple[int, ...]:
        """Return the pages of the longest beginning of a chain that is in the pool.

        Args:
            names: Names of a chain, the first page first.
        """
        return tuple(self._found(names))

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        """Return pages to write to, or None, changing nothing, if fewer are free.

        Args:
            count: Pages.
            after: Last page of the table that they extend.
        """
        if count > self.num_free:
            return None
        pages: list[int] = []
        for _ in range(count):
            pages.append(self._take(pages[-1] if pages else after))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page, so that it is not evicted."""
        for page in pages:
            if not self._references[page]:
                del self._cached[page]
                if self._groups is not None:
                    self._groups.use(page)
            self._references[page] += 1

    def give(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page of a table, the last page first."""
        for page in reversed(pages):
            if not self._references[page]:
                raise AssertionError(f"page {page} is given back and has no reference")
            self._references[page] -= 1
            if not self._references[page]:
                free = self._blank if self._names[page] is None else self._cached
                free[page] = None
                if self._groups is not None:
                    self._groups.give(page, self._blank)

    def name(self, page: int, name: bytes) -> None:
        """Name a full page, unless another page has the name: then this one stays private."""
        if not self._references[page] or self._names[page] is not None:
            raise AssertionError(f"page {page} is free or has a name")
        if name not in self._page_of:
            self._page_of[name] = page
            self._names[page] = name

    def fork(
        self, pages: Sequence[int], num_tokens: int
    ) -> tuple[list[int], tuple[tuple[int, int], ...]] | None:
        """Return a second table of the same tokens: full pages are shared, the last is copied.

        Args:
            pages: Table.
            num_tokens: Computed tokens in it.

        Returns:
            The new table, and (from, to) of the pages to copy before the next step; None, with
            nothing changed, if a page to copy to is lacking.
        """
        full, remainder = divmod(num_tokens, self.page_size)
        last_page = self.take(1 if remainder else 0)
        if last_page is None:
            return None
        self.share(pages[:full])
        return [*pages[:full], *last_page], tuple((pages[full], page) for page in last_page)

    def demote(self, names: Iterable[bytes]) -> None:
        """Let the pages of a chain that no sequence holds be taken before other named ones.

        Args:
            names: Names of the chain, the first page first.
        """
        for page in self.find(names):
            if page in self._cached:
                self._cached.move_to_end(page, last=False)
                if self._groups is not None:
                    self._groups.demote(page)

    def forget(self) -> None:
        """Drop all names, because what the pages hold is not known any more."""
        self._page_of.clear()
        self._names = [None] * self.size
        self._blank.update(self._cached)
        self._cached.clear()
        if self._groups is not None:
            self._groups.forget()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants.

        Args:
            tables: Pages of every sequence.

        Raises:
            AssertionError: An invariant does not hold.
        """
        counts = collections.Counter(page for table in tables for page in table)
        for page in range(self.size):
            count = self._references[page]
            name = self._names[page]
            if count != counts[page]:
                raise AssertionError(f"page {page}: {count} references, in {counts[page]} tables")
            places = (page in self._blank, page in self._cached, count > 0)
            if sum(places) != 1 or (not count and places[1] != (name is not None)):
                raise AssertionError(f"page {page}: blank, cached, used are {places}")
            if name is not None and self._page_of.get(name) != page:
                raise AssertionError(f"page {page}: its name belongs to another page")
        if (groups := self._groups) is not None and groups != self._free_groups(groups):
            raise AssertionError("the groups are not those of the free pages")
        if len(self._page_of) != sum(name is not None for name in self._names):
            raise AssertionError("a name belongs to no page")

    def _free_groups(self, groups: _Groups) -> _Groups:
        """Return the groups counted anew, in the order that they have."""
        freed = dataclasses.replace(groups, free=[0] * len(groups.free))
        size = groups.size
        for group in range(len(freed.free)):
            pages = range(group * size, (group + 1) * size)
            freed.free[group] = sum(not self._references[page] for page in pages)
            is_blank = all(page in self._blank for page in pages)
            is_cached = freed.free[group] == size and not is_blank
            if (is_blank, is_cached) != (group in groups.blank, group in groups.cached):
                raise AssertionError(f"group {group} is blank, cached: {is_blank, is_cached}")
        return freed

    def _found(self, names: Iterable[bytes]) -> Iterator[int]:
        for name in names:
            if (page := self._page_of.get(name)) is None:
                return
            yield page

    def _take(self, after: int | None) -> int:
        page = None
        if self._groups is not None:
            page = self._beside(self._groups, after)
        if page is None:
            page = next(iter(self._blank or self._cached))
        del (self._blank if page in self._blank else self._cached)[page]
        if self._groups is not None:
            self._groups.use(page)
        if (name := self._names[page]) is not None:
            del self._page_of[name]
            self._names[page] = None
        self._references[page] = 1
        return page

    def _beside(self, groups: _Groups, after: int | None) -> int | None:
        """Return the free page after another one of its group, or the first of a free group.

        Pages without a name go first, and of groups with names the least recently used one.
        """
        size = groups.size
        page = -1 if after is None else after + 1
        if page // size in groups.blank or (page % size and page in self._blank):
            return page
        if groups.blank:
            return next(iter(groups.blank)) * size
        if page % size and page in self._cached:
            return page
        return next(iter(groups.cached)) * size if groups.cached else None
