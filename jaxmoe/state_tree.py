# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Converts a state to nested dicts of plain arrays, the content of a checkpoint, and back.

Flax's serialization turns records, named tuples and lists into dicts, and quantised arrays into
values, scales and the order of channels. Random keys become integers. Empty branches are left out
and restored from the target. Names with '/' or '.' are an error, because stores join names with
them.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import serialization, traverse_util

from pallas_kernels import MixedArray, QuantizedArray

SEPARATOR = "/"

serialization.register_serialization_state(
    QuantizedArray,
    lambda array: {"values": array.values, "scales": array.scales},
    lambda target, state: dataclasses.replace(target, **state),
)
serialization.register_serialization_state(
    MixedArray,
    lambda array: {"weights": serialization.to_state_dict(array.weights), "order": array.order},
    lambda target, state: dataclasses.replace(
        target,
        weights=serialization.from_state_dict(target.weights, state["weights"]),
        order=state["order"],
    ),
)


class ExternalArray(abc.ABC):
    """Leaf of a state whose values lie outside the memory of this process until they are read.

    It has the shape, dtype, sharding, `is_deleted` and `__array__` of an array, so that it is saved
    as any other leaf. A second copy of it is never made, and no device holds a replica.
    """

    place: ClassVar[str]
    """Where the values are, as messages say it."""

    @abc.abstractmethod
    def is_deleted(self) -> bool:
        """Return whether a later step has replaced the values."""


def without_external(tree: Any) -> Any:
    """Return a state with None in place of its external arrays.

    Args:
        tree: State.
    """
    return jax.tree.map(lambda leaf: None if isinstance(leaf, ExternalArray) else leaf, tree)


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed random keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of a state by path; random keys are unchanged.

    Raises:
        ValueError: A name is empty or contains '/' or '.'.
    """
    nested = serialization.to_state_dict(tree)
    if not isinstance(nested, dict):
        raise ValueError("a checkpoint holds a tree of named arrays, not a single array")
    flat = traverse_util.flatten_dict(nested)
    for names in flat:
        for name in names:
            if not name or SEPARATOR in name or "." in name:
                raise ValueError(
                    f"the name {name!r} in {names} cannot be saved: names must not be empty, nor"
                    " hold '/' or '.'"
                )
    return {SEPARATOR.join(names): leaf for names, leaf in flat.items() if leaf is not None}


def pack(tree: Any) -> dict[str, Any]:
    """Return a state, of arrays or shapes, as nested dicts of plain arrays or shapes."""
    leaves = {
        path: _words_of(leaf) if is_key(leaf) else leaf for path, leaf in flatten(tree).items()
    }
    return traverse_util.unflatten_dict(leaves, sep=SEPARATOR)


def _words_of(key: Any) -> Any:
    """Return the words of a key, or their shape on the same devices."""
    if not isinstance(key, jax.ShapeDtypeStruct):
        return jax.random.key_data(key)
    key_words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(key.shape, key.dtype))
    return jax.ShapeDtypeStruct(key_words.shape, key_words.dtype, sharding=key.sharding)


def shapes_of(state: Any) -> Any:
    """Return shapes, dtypes and shardings of a state, which holds none of its memory."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def unpack(packed: dict[str, Any], target: Any) -> Any:
    """Return the state of `pack`, in the structure of a target.

    Args:
        packed: Nested dicts of `pack`.
        target: State of the same structure: arrays or `jax.ShapeDtypeStruct`.
    """
    flat = traverse_util.flatten_dict(packed, sep=SEPARATOR)
    for path, leaf in flatten(target).items():
        if is_key(leaf):
            flat[path] = jax.random.wrap_key_data(
                jnp.asarray(flat[path]), impl=_implementation(leaf)
            )
    nested = traverse_util.unflatten_dict(flat, sep=SEPARATOR)
    return serialization.from_state_dict(target, _with_empties(nested, target))


def _implementation(leaf: Any) -> str:
    """Return the name of a key array's generator, from its dtype `key<name>`."""
    names = {"fry": "threefry2x32", "rbg": "rbg", "unsafe_rbg": "unsafe_rbg"}
    return names[str(leaf.dtype).removeprefix("key<").removesuffix(">")]


def _with_empties(nested: dict[str, Any], target: Any) -> Any:
    """Return nested dicts with the empty branches of the target."""
    target_dict = serialization.to_state_dict(target)

    def fill(have: Any, want: Any) -> Any:
        if not isinstance(want, dict):
            return have
        return {
            name: fill(have.get(name, {}) if have else {}, child) if child is not None else None
            for name, child in want.items()
        }

    return fill(nested, target_dict)
