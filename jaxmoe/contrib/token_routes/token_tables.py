# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the tables by which token shuffling predicts devices (`token_shuffle.py`).

The file is a compressed .npz (`numpy.load` opens it):

    id_device, id_confidence        [L V]    by token id
    next_device, next_confidence    [L P]    by the device in the MoE layer below
    num_experts                     [] i64   E, of which every device holds E/P in order

Devices are u8, or u16 from P = 256 on; confidences are f16. `jaxmoe place --tables`
writes it. A step that shuffles contains the tables as constants: 3 bytes for each MoE layer and
token id.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import zipfile
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxmoe.contrib.token_routes.token_shuffle import (
    ShuffledTokens,
    TokenTables,
    check_moved,
    order_tokens,
)
from sharding.expert_parallel.routes import TokenRoute

_ARRAYS = tuple(field.name for field in dataclasses.fields(TokenTables))


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTables:
    """Tables of all MoE layers as they are stored."""

    arrays: dict[str, np.ndarray]
    """The fields of `TokenTables`."""
    num_experts: int
    """E."""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that must equal those of the model and the mesh."""
        layers, vocab_size = self.arrays["id_device"].shape
        return {
            "num_devices": self.arrays["next_device"].shape[1],
            "num_layers": layers,
            "num_experts": self.num_experts,
            "vocab_size": vocab_size,
        }

    def check(self, path: str, expected_sizes: dict[str, int]) -> None:
        """Check that the tables have been made for this model and mesh.

        Args:
            path: Path of the file, for the message.
            expected_sizes: Sizes by the names of `sizes`.

        Raises:
            ValueError: A size is another.
        """
        subjects = {
            "num_devices": "devices of the expert axes (place --devices)",
            "num_layers": "MoE layers",
            "num_experts": "experts (model.moe.num_experts)",
            "vocab_size": "token ids (model.vocab_size)",
        }
        for name, size in self.sizes.items():
            if size != expected_sizes[name]:
                raise ValueError(
                    f"execution.dispatcher.token_tables={path!r} is for {size} {subjects[name]},"
                    f" and this run has {expected_sizes[name]}: write the tables of this model"
                    f" and mesh"
                    " with jaxmoe place --tables FILE, or leave them out"
                )

    def of_layer(self, layer: Int[Array, ""]) -> TokenTables:
        """Return the tables of one layer, i32 and f32.

        Args:
            layer: Number among the MoE layers; may be traced.
        """
        rows = {name: jnp.asarray(array)[layer] for name, array in self.arrays.items()}
        return TokenTables(
            **{
                name: row.astype(jnp.int32 if name.endswith("device") else jnp.float32)
                for name, row in rows.items()
            }
        )


def save_tables(path: str | os.PathLike[str], tables: TokenTables, num_experts: int) -> None:
    """Write tables, and create their directory.

    Args:
        path: Path of the file.
        tables: Tables of all MoE layers.
        num_experts: E.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    narrow = np.uint8 if tables.next_device.shape[-1] <= 256 else np.uint16
    arrays: dict[str, Any] = {
        name: np.asarray(getattr(tables, name)).astype(
            narrow if name.endswith("device") else np.float16
        )
        for name in _ARRAYS
    }
    with open(path, "wb") as file:  # numpy appends .npz to a path without it
        np.savez_compressed(file, num_experts=np.int64(num_experts), **arrays)


def load_tables(path: str | os.PathLike[str]) -> StoredTables:
    """Return the tables in a file.

    Args:
        path: Path of a file from `save_tables`.

    Raises:
        ValueError: The file does not exist or holds no such tables.
    """
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError as error:
        raise ValueError(_refusal(path, error.strerror or "cannot be read")) from error
    return _load(os.fspath(path), changed)


@functools.lru_cache(maxsize=2)
def _load(path: str, changed: int) -> StoredTables:
    """Return the tables in a file; it is read again after it has changed."""
    del changed
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in _ARRAYS}
            number = int(file["num_experts"])
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(_refusal(path, str(error))) from error
    ids = arrays["id_device"]
    below = arrays["next_device"]
    if ids.ndim != 2 or below.ndim != 2 or len(ids) != len(below) or not below.size:
        raise ValueError(
            _refusal(
                path, f"id_device {ids.shape} must be [L V] and next_device {below.shape} [L P]"
            )
        )
    for name, array in arrays.items():
        like = ids if name.startswith("id") else below
        kind = "u" if "device" in name else "f"
        if array.shape != like.shape or array.dtype.kind != kind:
            raise ValueError(_refusal(path, f"{name} is {array.dtype} {array.shape}"))
        if "device" in name and array.max(initial=0) >= below.shape[1]:
            raise ValueError(
                _refusal(path, f"{name} names device {array.max()} of {below.shape[1]}")
            )
    return StoredTables(arrays, number)


def _refusal(path: str | os.PathLike[str], reason: str) -> str:
    return (
        f"execution.dispatcher.token_tables={os.fspath(path)!r} is no file of token tables"
        f" ({reason}): write one with jaxmoe place --tables FILE"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class TablesRoute(TokenRoute):
    """Tokens first move to the device that probably holds their experts, by tables in a file."""

    name: ClassVar[str] = "tables"

    path: str
    """File of the tables, the same on every host."""

    def check_model(
        self, *, num_devices: int, num_layers: int, num_experts: int, vocab_size: int
    ) -> None:
        """Check that the tables are those of this model on so many devices."""
        if num_devices == 1:
            return
        sizes = {
            "num_devices": num_devices,
            "num_layers": num_layers,
            "num_experts": num_experts,
            "vocab_size": vocab_size,
        }
        load_tables(self.path).check(self.path, sizes)

    def check_tokens(self, num_tokens: int, num_devices: int, *, is_token_major: bool) -> None:
        """Check that tokens choose experts, and that devices divide them."""
        check_moved(num_tokens, num_devices, is_token_major=is_token_major)

    def moves(
        self,
        layer: Int[Array, ""],
        token_ids: Int[Array, " T"],
        token_mask: Bool[Array, " T"],
        below: Int[Array, " T"],
        num_devices: int,
    ) -> ShuffledTokens:
        """Return the order of the tokens by the tables of their layer."""
        tables = load_tables(self.path).of_layer(layer)
        return order_tokens(tables, token_ids, token_mask, below, num_devices)
