# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of the scans."""

from collections.abc import Mapping

import jax.numpy as jnp

from pallas_kernels.array_types import Array


def check_arrays(
    operation: str, shapes: Mapping[str, str], arrays: Mapping[str, Array]
) -> dict[str, int]:
    """Check arrays against letters, and return the size of each letter.

    Args:
        operation: Name of the operation, for messages.
        shapes: Letters of each array's dimensions.
        arrays: Arrays of the same names.

    Raises:
        ValueError: A shape contradicts an earlier one, or a dtype does not fit.
    """
    sizes: dict[str, int] = {}
    for name, letters in shapes.items():
        array = arrays[name]
        expected = [sizes.get(letter) for letter in letters]
        if array.ndim != len(letters) or any(
            size not in (None, dtypes) for size, dtypes in zip(expected, array.shape, strict=False)
        ):
            rule = " ".join(
                letter if size is None else f"{letter}={size}"
                for letter, size in zip(letters, expected, strict=True)
            )
            raise ValueError(f"{operation}: {name} must be [{rule}], not {list(array.shape)}.")
        sizes.update(zip(letters, array.shape, strict=True))
    for name in ("dt", "decay"):
        if arrays[name].dtype != jnp.float32:
            raise ValueError(
                f"{operation}: {name} must be float32, not {arrays[name].dtype}: decays multiply "
                "over the sequence. Convert it."
            )
    dtypes = {name: str(arrays[name].dtype) for name in ("x", "b", "c")}
    if len(set(dtypes.values())) > 1 or not jnp.issubdtype(arrays["x"].dtype, jnp.floating):
        raise ValueError(
            f"{operation}: x, b and c must have one floating dtype, not {dtypes}: convert them."
        )
    return sizes


def check_tokens(
    operation: str,
    x: Array,
    segment_ids: Array | None,
    state: tuple[tuple[int, ...], Array | None],
    chunk: int,
) -> None:
    """Check segment ids, the initial state and the length of a chunk.

    Args:
        operation: Name of the operation, for messages.
        x: Inputs [B S ...].
        segment_ids: Ids [B S], or None.
        state: Shape of a state, and the initial one or None.
        chunk: Tokens of a chunk.

    Raises:
        ValueError: One of them does not fit.
    """
    if segment_ids is not None and (
        segment_ids.shape != x.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer)
    ):
        raise ValueError(
            f"{operation}: segment_ids must be integers [B S] = {list(x.shape[:2])}, not "
            f"{segment_ids.dtype} {list(segment_ids.shape)}."
        )
    shape, initial = state
    if initial is not None and (initial.shape != shape or initial.dtype != jnp.float32):
        raise ValueError(
            f"{operation}: initial must be float32 {list(shape)}, not {initial.dtype} "
            f"{list(initial.shape)}."
        )
    if chunk < 1:
        raise ValueError(f"{operation}: chunk={chunk} must be at least 1.")
