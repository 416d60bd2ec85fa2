# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of one process as several processes, one for each stage, would have written it."""

from __future__ import annotations

import json
import pathlib
import shutil

import tensorstore

from jaxmoe.checkpoint import checksums


def _stored(place: pathlib.Path) -> tensorstore.KvStore:
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{place}/"}}
    return tensorstore.KvStore.open(spec).result()


def _open(place: pathlib.Path, context: tensorstore.Context) -> tensorstore.KvStore:
    base = {"driver": "file", "path": f"{place}/"}
    # As Orbax writes, but for values that lie beside their keys: there up to 1024 bytes.
    config = {"max_decoded_node_bytes": 100_000_000, "max_inline_value_bytes": 40}
    spec = {"driver": "ocdbt", "base": base, "config": config}
    return tensorstore.KvStore.open(spec, context=context).result()


def split_by_stage(step: pathlib.Path, stages: int) -> None:
    """Rewrite the store of a step: each stage's chunks in a store of their own, all merged.

    A chunk belongs to the stage that holds its part of the dimension that `stages` cuts: layers or
    vocabulary. The others belong to stage 0; every store has the descriptions of all arrays.

    Args:
        step: Directory of the step.
        stages: Number of stages.
    """
    state, context = step / "state", tensorstore.Context()
    old = _stored(state)
    items = {key.decode(): old.read(key).result().value for key in old.list().result()}
    shapes = {
        name.removesuffix("/.zarray"): json.loads(value)
        for name, value in items.items()
        if name.endswith("/.zarray")
    }
    for place in (state / "ocdbt.process_0", state / "d"):
        shutil.rmtree(place)
    (state / "manifest.ocdbt").unlink()

    def owner(name: str, chunk: str) -> int:
        parts, places = ["", *name.split(".")], [int(place) for place in chunk.split(".")]
        is_cut = parts[-2] in ("embedding", "head") or any("blocks" in part for part in parts)
        if not is_cut:
            return 0
        cut = 1 if parts[-2] == "head" else 0
        size, block = shapes[name]["shape"][cut], shapes[name]["chunks"][cut]
        return places[cut] * block * stages // size

    for stage in range(stages):
        own = _open(state / f"ocdbt.process_{stage}", context)
        with tensorstore.Transaction(atomic=True) as transaction:
            for key, value in items.items():
                name, _, chunk = key.rpartition("/")
                if chunk == ".zarray" or owner(name, chunk) == stage:
                    own.with_transaction(transaction).write(key, value).result()
    context = tensorstore.Context()  # copies by reference need one for both stores
    whole = _open(state, context)
    with tensorstore.Transaction(atomic=True) as transaction:
        for stage in range(stages):
            own = _open(state / f"ocdbt.process_{stage}", context)
            own.experimental_copy_range_to(whole.with_transaction(transaction)).result()
    checksums.write_list(step)


def lose_stage(step: pathlib.Path, stage: int) -> None:
    """Delete the files of a stage after `split_by_stage`."""
    shutil.rmtree(step / "state" / f"ocdbt.process_{stage}")
