# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps pages in host memory: those of swapped sequences, and copies of named pages.

Which names are copied and dropped is decided by `jaxmoe.serve.blocks.HostCopies`; a page that a
swapped sequence and a name have in common is held once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxmoe.serve.device.transfers import HeldPages, host_bytes, join_pages, part_pages
from jaxmoe.serve.step import Swap


class HostPages:
    """Pages of one executor in host memory; each value is the content of one page."""

    def __init__(self) -> None:
        self._swapped: dict[int, tuple[HeldPages, ...]] = {}
        self._named: dict[bytes, HeldPages] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        groups = [
            *self._named.values(),
            *(pages_of_group for pages in self._swapped.values() for pages_of_group in pages),
        ]
        return sum(
            host_bytes(pages_of_group.pools)
            for pages_of_group in {
                id(pages_of_group): pages_of_group for pages_of_group in groups
            }.values()
        )

    def out(self, swap: Swap, read: Callable[[Sequence[int]], HeldPages]) -> None:
        """Keep the pages of a sequence; only those without a copy are read.

        Args:
            swap: Pages that leave the device.
            read: Returns the content of some pages of the device.
        """
        named_pages = [self._named[name] for name in swap.names[: swap.kept]]
        unnamed = swap.pages[swap.kept :]
        pages = (*named_pages, *(part_pages(read(unnamed)) if unnamed else ()))
        self._swapped[swap.id] = pages
        self._named |= dict(zip(swap.names, pages, strict=False))
        for name in swap.dropped:
            self._named.pop(name, None)

    def back(self, swap: Swap, write: Callable[[Sequence[int], HeldPages], None]) -> None:
        """Give the pages of a sequence back; the copies of named ones stay.

        Args:
            swap: Pages that return to the device.
            write: Writes the content of some pages.
        """
        write(swap.pages, join_pages(self._swapped.pop(swap.id)))

    def drop(self, number: int) -> None:
        """Free the pages of a swapped sequence that has ended."""
        self._swapped.pop(number, None)

    def copy(self) -> HostPages:
        """Return the same pages, for another executor that takes over."""
        copied = HostPages()
        copied._swapped, copied._named = dict(self._swapped), dict(self._named)
        return copied
