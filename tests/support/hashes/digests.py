# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hashes of arrays, trees and texts, which depend on numbers and public names alone.

A parameter is known by its path, a leaf of the optimiser state by its place. What a state holds
besides is a sorted list of leaves, so that a field may move within the state.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

LENGTH = 16
"""Hexadecimal digits that are kept of a hash."""


def digest(text: str | bytes) -> str:
    """Return the hash of a text or of bytes."""
    content = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(content).hexdigest()[:LENGTH]


def digest_of_array(array: Any) -> str:
    """Return the hash of the dtype, shape and bytes of an array, a key or a number."""
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    values = np.asarray(array)
    if values.dtype == object:
        raise TypeError(f"{array!r} has no bytes to hash: give an array, a number or a text")
    # NaN has many bit patterns: which one arises depends on the order of operands.
    if np.issubdtype(values.dtype, np.floating):
        values = np.where(np.isnan(values), np.asarray(np.nan, values.dtype), values)
    head = f"{values.dtype} {values.shape} ".encode()
    return digest(head + np.ascontiguousarray(values).tobytes())


def digest_of_tree(tree: Any) -> str:
    """Return the hash of a tree of dictionaries by path, and of the leaves of others in order."""
    return digest("\n".join(_lines(tree, "")))


def digest_of_set(tree: Any) -> str:
    """Return the hash of the leaves of a tree, wherever they are."""
    return digest("\n".join(sorted(map(digest_of_array, jax.tree.leaves(tree)))))


def digest_of_record(record: Any) -> str:
    """Return the hash of numbers and texts as JSON, floats in hexadecimal, keys sorted."""
    return digest(json.dumps(_plain(record), sort_keys=True))


def digest_of_file(path: pathlib.Path) -> str:
    """Return the hash of the bytes of a file."""
    return digest(path.read_bytes())


def parts_of_state(state: Any) -> dict[str, str]:
    """Return the hashes of a training state, in memory or read from a checkpoint.

    Args:
        state: Record or dictionary with the public fields `params`, `opt_state`, `router_state`.
    """
    fields = dict(state) if isinstance(state, Mapping) else _fields(state)
    params = fields.pop("params")
    opt_state = fields.pop("opt_state", None)  # a checkpoint has no empty tree
    router_state = fields.pop("router_state", None)
    parts = {"params": digest_of_tree(params), "rest of the state": digest_of_set(fields)}
    if jax.tree.leaves(opt_state):
        parts["optimizer state"] = digest_of_tree(jax.tree.leaves(opt_state))
    if jax.tree.leaves(router_state):
        parts["router state"] = digest_of_tree(jax.tree.leaves(router_state))
    return parts


def digest_of_collectives(text: str) -> str | None:
    """Return the hash of the collectives of a compiled program; None if it has none.

    Kind, shapes, groups of devices and number of executions count; names, order and metadata do
    not.

    Args:
        text: HLO text of the program.
    """
    from jaxmoe.planning.hlo import collectives

    executions: collections.Counter[str] = collections.Counter()
    for collective in collectives(text):
        facts = (collective.kind, collective.result_bytes, collective.operand_bytes)
        groups = sorted(tuple(int(device) for device in group) for group in collective.groups)
        times = "unknown" if collective.trip_count is None else collective.trip_count
        executions[f"{facts} {groups} x{times}"] += 1
    return digest_of_record(dict(executions)) if executions else None


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _lines(tree: Any, path: str) -> Iterable[str]:
    """Yield `path hash` for each leaf; keys of dictionaries sorted, all else in order."""
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from _lines(tree[key], f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for index, child in enumerate(tree):
            yield from _lines(child, f"{path}/{index}")
    elif isinstance(tree, str | bytes):
        yield f"{path} {digest(tree)}"
    elif tree is not None:
        for leaf in jax.tree.leaves(tree):
            yield f"{path} {digest_of_array(leaf)}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        children = [_plain(child) for child in value]
        return sorted(children, key=json.dumps) if isinstance(value, set | frozenset) else children
    if isinstance(value, bool | str | int | None):
        return value
    if isinstance(value, float | np.floating):
        return float(value).hex()
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.ndarray | jax.Array):
        return digest_of_array(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON: give numbers and texts")
