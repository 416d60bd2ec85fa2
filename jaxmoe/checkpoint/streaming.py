# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes and reads checkpoints one layer at a time, without whole stacked arrays in memory.

    save_streamed(directory, {"params/head/weight": Streamed((D, V), "float32", read)}, ...)
    arrays = open_stored(directory, step)          # {path: StoredArray}
    arrays["params/moe_blocks_0/attention/q"][3]   # layer 3, read from disk now

The files are those of a `CheckpointManager`, with the same checksums and fingerprints. A stacked
array is stored with one chunk per layer, so that one layer can be read alone. A `CheckpointManager`
does so for large arrays; a chunk of a smaller array is one device's shard with all of its layers.

One process reads or writes. The step has its final name while it is written: write to a temporary
directory and rename it at the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from jaxmoe.checkpoint import checksums
from jaxmoe.checkpoint.manifest import (
    CheckpointError,
    check_arrays,
    check_json,
    make_manifest,
)
from jaxmoe.checkpoint.restore import whole_step
from jaxmoe.checkpoint.writing import literal_path
from jaxmoe.fingerprints import RunningFingerprint
from jaxmoe.optional import require
from jaxmoe.state_tree import SEPARATOR, flatten, pack

_STATE = "state"
_MANIFEST = "manifest"
_FLAT = "."
"""Separator of names on disk, as in Orbax."""


@dataclasses.dataclass(frozen=True, slots=True)
class Streamed:
    """An array whose values are read when they are written."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int | None], np.ndarray]
    """Function that returns one layer, or the whole array for None."""
    is_stacked: bool = False
    """Whether the first dimension counts layers."""


def save_streamed(
    directory: Any,
    state: Any,
    streamed: Mapping[str, Streamed],
    *,
    step: int,
    config: dict[str, Any],
    data: dict[str, Any] | None = None,
) -> None:
    """Save one state, most of whose arrays are read while they are written.

    Args:
        directory: Directory of all checkpoints of a run; the state goes to `<directory>/<step>`.
        state: Arrays in memory, such as a `TrainState` without parameters.
        streamed: Further arrays by path.
        step: Number of the checkpoint.
        config: Config of the run as JSON.
        data: Data position.

    Raises:
        CheckpointError: The step exists, or a layer cannot be read or has another shape than
            declared. Files may be left in `<directory>/<step>`.
    """
    place = literal_path(directory) / str(step)
    if place.exists():
        raise CheckpointError(f"{directory} already has a checkpoint of step {step}")
    check_arrays(state)
    check_json(config=config, data=data or {})
    host_arrays = {path: np.asarray(leaf) for path, leaf in flatten(pack(state)).items()}
    writer = _Writer(streamed)
    items = host_arrays | {path: writer.stand_in(path) for path in streamed}
    stacked = {path for path, array in streamed.items() if array.is_stacked}
    options = {path: ocp.SaveArgs(shard_axes=(0,) if path in stacked else ()) for path in items}
    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, writer))
    arrays = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))
    try:
        arrays.save(
            place / _STATE,
            args=ocp.args.PyTreeSave(  # pyright: ignore[reportCallIssue]
                item=traverse_util.unflatten_dict(items, sep=SEPARATOR),
                save_args=traverse_util.unflatten_dict(options, sep=SEPARATOR),
            ),
        )
    finally:
        arrays.close()
        writer.check()  # the cause, where Orbax found arrays missing
    manifest = make_manifest(state, step=step, config=config, data=data or {})
    shapes = {
        path: {"shape": list(array.shape), "dtype": array.dtype} for path, array in streamed.items()
    }
    manifest = dataclasses.replace(
        manifest,
        arrays=dict(sorted((manifest.arrays | shapes).items())),
        fingerprints=manifest.fingerprints | writer.fingerprints(),
    )
    checkpointer = ocp.Checkpointer(ocp.JsonCheckpointHandler())
    checkpointer.save(
        place / _MANIFEST,
        args=ocp.args.JsonSave(manifest.to_json()),  # pyright: ignore[reportCallIssue]
    )
    checkpointer.close()
    checksums.write_list(place)


class _Writer(ocp.type_handlers.NumpyHandler):
    """Writes numpy arrays as Orbax does, and streamed arrays layer by layer.

    Orbax receives placeholders for streamed arrays: their shape and dtype, one element of memory.
    """

    def __init__(self, streamed: Mapping[str, Streamed]):
        super().__init__(deepcopy_host_arrays=False)
        self._streamed = streamed
        self._paths: dict[int, str] = {}
        self._stand_ins: list[np.ndarray] = []
        self._prints = {path: RunningFingerprint(array.shape) for path, array in streamed.items()}
        self._turn = asyncio.Lock()
        self._error: CheckpointError | None = None

    def stand_in(self, path: str) -> np.ndarray:
        """Return the placeholder of a streamed array."""
        array = self._streamed[path]
        made = np.broadcast_to(np.zeros((), jnp.dtype(array.dtype)), array.shape)
        self._stand_ins.append(made)  # keeps its id unique
        self._paths[id(made)] = path
        return made

    def check(self) -> None:
        """Raise the first error of reading, once nothing is being written any more.

        Raised at once, it would leave writers of other arrays behind, which make files in a
        directory that the caller removes.
        """
        if self._error is not None:
            raise self._error

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of the written arrays."""
        return {path: fingerprint.value for path, fingerprint in self._prints.items()}

    async def _open_and_write(
        self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any
    ) -> None:
        path = self._paths.get(id(value))
        if path is None:
            await super()._open_and_write(value, tspec, ts_context)
            return
        array = self._streamed[path]
        running = self._prints[path]
        tensorstore = require("tensorstore")  # a dependency of Orbax
        store = await tensorstore.open(
            tensorstore.Spec(tspec), create=True, open=True, context=ts_context
        )
        # One layer of one array in memory at a time; it is not changed, so no copy is needed.
        async with self._turn:
            layers = range(array.shape[0]) if array.is_stacked else [None]
            shape = array.shape[1:] if array.is_stacked else array.shape
            for layer in layers:
                if self._error is not None:
                    return
                try:
                    values = _check(path, array.read(layer), shape)
                except CheckpointError as error:
                    self._error = error
                    return
                part = store if layer is None else store[layer]
                is_part = layer is not None or not values.ndim
                running.add(values[None] if is_part else values, layer or 0)
                await part.write(values, can_reference_source_data_indefinitely=True)


def _check(path: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if values.shape != shape:
        raise CheckpointError(f"{path}: found {list(values.shape)}, expected {list(shape)}")
    return values


class StoredArray:
    """An array of a checkpoint with known shape and dtype, read on demand.

    `array[layer]` reads one layer, `numpy.asarray(array)` the whole array.
    """

    def __init__(self, state: pathlib.Path, path: str, shape: tuple[int, ...], dtype: str):
        self.shape, self.dtype, self.ndim = shape, jnp.dtype(dtype), len(shape)
        self.size = int(np.prod(shape))
        self._state = state
        self._path = path
        self._store: Any = None

    def __getitem__(self, layer: int) -> np.ndarray:
        return np.asarray(self._file()[layer].read().result())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # every read makes a new array
        values = np.asarray(self._file().read().result())
        return values if dtype is None else values.astype(dtype)

    def _file(self) -> Any:
        if self._store is None:
            settings = json.loads((self._state / "_METADATA").read_text(encoding="utf-8"))
            is_third = bool(settings.get("use_zarr3"))
            spec = {
                "driver": "zarr3" if is_third else "zarr",
                "kvstore": {
                    "driver": "ocdbt",
                    "base": {"driver": "file", "path": f"{self._state}/"},
                    "path": self._path.replace(SEPARATOR, _FLAT) + "/",
                },
            }
            self._store = require("tensorstore").open(spec, open=True, read=True).result()
            if self._store.shape != self.shape or self._store.dtype.numpy_dtype != self.dtype:
                raise CheckpointError(
                    f"{self._state.parent}: {self._path} differs from its manifest"
                )
        return self._store


def open_stored(directory: Any, step: int | None = None) -> tuple[int, dict[str, StoredArray]]:
    """Open the arrays of a checkpoint without reading them; random keys are left out.

    Args:
        directory: Directory of the checkpoints of a run.
        step: Step to open; the newest with undamaged files when None.

    Returns:
        The step, and its arrays by path.

    Raises:
        CheckpointError: There is no such step, or its files differ from their checksums.
    """
    path, manifest = whole_step(directory, step)
    state = pathlib.Path(path) / _STATE
    return manifest.step, {
        path: StoredArray(state, path, tuple(array["shape"]), array["dtype"])
        for path, array in manifest.arrays.items()
        if array["dtype"] != "key"
    }
