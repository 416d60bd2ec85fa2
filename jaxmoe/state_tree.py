# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A state as nested dicts of plain arrays, which is what a checkpoint holds, and back.

Records, named tuples and lists become dicts by flax's serialization, quantised arrays their values
and scales; random keys become their words; empty branches are left out and come back from the
target. Names with '/' or '.' are refused: stores join names with them, and two parameters could
become one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import serialization, traverse_util

from pallas_kernels import QuantizedArray

SEPARATOR = "/"

serialization.register_serialization_state(
    QuantizedArray,
    lambda array: {"values": array.values, "scales": array.scales},
    lambda target, state: dataclasses.replace(target, **state),
)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def flatten(tree: Any) -> dict[str, Any]:
    """{path: leaf} of a state, keys as they are.

    Raises:
        ValueError: a name that a store could confuse with a path.
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
    """Nested dicts of plain arrays."""
    leaves = {
        path: jax.random.key_data(leaf) if is_key(leaf) else leaf
        for path, leaf in flatten(tree).items()
    }
    return traverse_util.unflatten_dict(leaves, sep=SEPARATOR)


def unpack(packed: dict[str, Any], target: Any) -> Any:
    """The state again, in the structure of a target.

    Args:
        packed: from `pack`, restored.
        target: a state of the same structure: arrays or `jax.ShapeDtypeStruct`.
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
    """Name of the generator of a key array, from its dtype `key<name>`."""
    names = {"fry": "threefry2x32", "rbg": "rbg", "unsafe_rbg": "unsafe_rbg"}
    return names[str(leaf.dtype).removeprefix("key<").removesuffix(">")]


def _with_empties(nested: dict[str, Any], target: Any) -> Any:
    """Puts back the empty branches of the target."""
    wanted = serialization.to_state_dict(target)

    def fill(have: Any, want: Any) -> Any:
        if not isinstance(want, dict):
            return have
        return {
            name: fill(have.get(name, {}) if have else {}, child) if child is not None else None
            for name, child in want.items()
        }

    return fill(nested, wanted)
