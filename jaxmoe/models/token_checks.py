# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Refuses what is not rows of token ids, before a device computes something else from it.

A device clips an id outside the vocabulary, without an error. Inside of `jax.jit` only shape and
dtype are known; the loader checks the ids of its batches on the host.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def check_tokens(
    tokens: Any, vocab_size: int, name: str = "tokens", *, has_ids: bool = True
) -> None:
    """Raise unless an argument is an array [B, S] of ids of the vocabulary.

    Args:
        tokens: Argument of a caller. Ids are compared where they are known on this host.
        vocab_size: Number of ids.
        name: Name of the argument, for messages.
        has_ids: Whether to compare the ids of an array on devices, which waits for it.

    Raises:
        ValueError: It is no array, has other dimensions or no integers, or an id is outside.
    """
    shape = getattr(tokens, "shape", None)
    if shape is None:
        raise ValueError(
            f"{name} has type {type(tokens).__name__}, which must be an array of token ids [B, S]:"
            f" give jax.numpy.asarray({name}), with rows of one length"
        )
    if len(shape) != 2:
        hint = f": give {name}[None, :] for one row" if len(shape) == 1 else ""
        raise ValueError(
            f"{name} has shape {tuple(shape)}, which must be [B, S], rows of ids{hint}"
        )
    if not jax.numpy.issubdtype(tokens.dtype, jax.numpy.integer):
        raise ValueError(
            f"{name} has dtype {tokens.dtype}, which must be an integer type: convert it where it"
            " is made"
        )
    if not (isinstance(tokens, np.ndarray) or (has_ids and _is_known(tokens))):
        return
    ids = np.asarray(tokens)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        row, position = np.argwhere(outside)[0]
        raise ValueError(
            f"{name}[row {row}, position {position}] is {ids[row, position]}, outside the"
            f" vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}): use the tokenizer that the"
            " model was made for, or a model with its vocab_size"
        )


def _is_known(tokens: Any) -> bool:
    """Return whether the values of an array can be read on this host."""
    is_array = isinstance(tokens, jax.Array) and not isinstance(tokens, Tracer)
    return is_array and tokens.is_fully_addressable
