# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Classifies pairs of blocks by the mask, so that kernels skip what is hidden.

The lowest and highest position and segment of both blocks decide:

    HIDDEN   no query sees any key               the kernel never loads the block
    MASKED   some may                            the kernel masks every value
    WHOLE    every query sees every key          the kernel needs no mask

The bounds are exact for a causal mask, a window and sorted documents, and safe for any order: a
pair is at worst MASKED without need. `list_visible` turns the kinds into lists with the WHOLE
blocks first: a kernel runs through them without a mask, then through the MASKED ones with it.

Where no token is a JAX array, numpy makes the lists at trace time, and they are constants of the
program. They hold one number per pair of blocks, S U / (block_q block_k).

To add a rule of the mask: `pallas_kernels/flash_attention/mask.py`.
"""

from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.mask import Rules, Tokens

HIDDEN = 0
MASKED = 1
WHOLE = 2

# Larger tables are computed on the device: constants make programs large.
MAX_CONSTANT = 2**16


class BlockLists(NamedTuple):
    """Blocks of the other side that every block meets; b is B, or 1 for all sequences."""

    order: Array
    """[b blocks others] i32: WHOLE blocks, then MASKED ones, then the rest."""
    counts: Array
    """[b blocks 2] i32: number of WHOLE blocks, and of blocks met."""


def kinds_of_blocks(
    rules: Rules, tokens: Tokens, lengths: tuple[int, int], blocks: tuple[int, int]
) -> Any:
    """Return the kind of every pair of blocks.

    Args:
        rules: Mask rules.
        tokens: Positions and segments.
        lengths: S and U. A last block of keys that is not full is never WHOLE.
        blocks: Queries and keys in a block.

    Returns:
        [b S/block U/block] i32, rounded up; a numpy array where `tokens` hold no JAX array.
    """
    counts = tuple(-(-length // block) for length, block in zip(lengths, blocks, strict=True))
    is_known = all(x is None or isinstance(x, np.ndarray) for x in tokens)
    is_constant = is_known and counts[0] * counts[1] <= MAX_CONSTANT
    np_or_jnp = np if is_constant else jnp
    q_low, q_high = _bounds(tokens.q_positions, lengths[0], blocks[0], np_or_jnp)
    k_low, k_high = _bounds(tokens.kv_positions, lengths[1], blocks[1], np_or_jnp)
    q_low = q_low[:, :, None]
    q_high = q_high[:, :, None]
    k_low = k_low[:, None, :]
    k_high = k_high[:, None, :]

    # nearest <= q - k <= farthest for every pair of tokens.
    nearest = q_low - k_high
    farthest = q_high - k_low
    is_hidden = np_or_jnp.zeros(nearest.shape, bool)
    is_whole = np_or_jnp.ones(nearest.shape, bool)
    if rules.causal:
        is_hidden = is_hidden | (farthest < 0)
        is_whole = is_whole & (nearest >= 0)
    if rules.window is not None:
        is_hidden = is_hidden | (nearest >= rules.window) | (farthest <= -rules.window)
        is_whole = is_whole & (farthest < rules.window) & (nearest > -rules.window)
    if tokens.q_segment_ids is not None and tokens.kv_segment_ids is not None:
        q_low, q_high = _bounds(tokens.q_segment_ids, lengths[0], blocks[0], np_or_jnp)
        k_low, k_high = _bounds(tokens.kv_segment_ids, lengths[1], blocks[1], np_or_jnp)
        q_low = q_low[:, :, None]
        q_high = q_high[:, :, None]
        k_low = k_low[:, None, :]
        k_high = k_high[:, None, :]
        is_hidden = is_hidden | (q_high < k_low) | (k_high < q_low)
        is_whole = is_whole & (q_low == k_high) & (q_high == k_low)
    is_full = (np_or_jnp.arange(counts[1]) + 1) * blocks[1] <= lengths[1]
    is_whole = is_whole & is_full[None, None, :]
    kinds = np_or_jnp.where(is_whole, WHOLE, MASKED)
    return np_or_jnp.where(is_hidden, HIDDEN, kinds).astype(np.int32)


def list_visible(kinds: Any) -> BlockLists:
    """Return the lists for dimension 1 of `kinds`; swap dimensions 1 and 2 for the other side."""
    np_or_jnp = np if isinstance(kinds, np.ndarray) else jnp
    order = np_or_jnp.argsort(-kinds, axis=2, stable=True)
    is_met = np_or_jnp.stack([kinds == WHOLE, kinds != HIDDEN], axis=-1)
    counts = np_or_jnp.sum(is_met, axis=2, dtype=np.int32)
    return BlockLists(jnp.asarray(order, jnp.int32), jnp.asarray(counts))


def _bounds(
    positions: Array | np.ndarray | None, length: int, block: int, np_or_jnp: ModuleType
) -> tuple[Any, Any]:
    """Return the lowest and highest value of every block [b blocks]; None counts from 0."""
    values: Any = np_or_jnp.arange(length, dtype=np.int32) if positions is None else positions
    values = (values[None] if values.ndim == 1 else values).astype(np.int32)
    # Padding repeats the last value, which moves no bound.
    values = np_or_jnp.pad(values, ((0, 0), (0, -length % block)), mode="edge")
    values = values.reshape(values.shape[0], -1, block)
    return values.min(axis=2), values.max(axis=2)
