# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`FileArray`: an array of an optimiser state whose parts lie in files."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import numpy as np

from jaxmoe.contrib.offload.part_files import PartFiles
from jaxmoe.state_tree import ExternalArray


class FileArray(ExternalArray):
    """Array in files; a leaf of a state between two steps. It is read when it is converted.

    A step that is accepted replaces the values: the array is then deleted, as one that was donated.

    Args:
        files: Files of the state.
        where: Number of each part, and the place of the array in it.
        like: Shape, dtype and sharding in memory.
    """

    place: ClassVar[str] = "files"

    def __init__(self, files: PartFiles, where: tuple[tuple[int, int], ...], like: Any):
        self._files = files
        self._where = where
        self._version = files.version
        self.shape: tuple[int, ...] = tuple(like.shape)
        self.dtype = np.dtype(like.dtype)
        self._placed = like.sharding

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Layout of the array in memory."""
        return self._placed

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.size * self.dtype.itemsize

    def is_deleted(self) -> bool:
        """Return whether a later step has replaced the values."""
        return self._files.version != self._version

    def renew(self) -> FileArray:
        """Return the array with the values that the files have now."""
        return FileArray(self._files, self._where, self)

    def is_in(self, files: PartFiles | None) -> bool:
        """Return whether the array lies in some files."""
        return self._files is files

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.is_deleted():
            raise RuntimeError("the array has been deleted: a later step has replaced its values")
        parts = [self._files.piece(number, place) for number, place in self._where]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return array if dtype is None else array.astype(dtype, copy=False)
