# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sums of blocks: residuals fall, prefixes are truncated sums, sizes are those of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.few_bits.bitstack import (
    BitStack,
    add_block,
    block_bytes,
    decompose,
    expand,
    prefix,
    scales_of,
    sort_blocks,
    stacked_rows,
    stacked_shape,
)
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.quantize import stored_bytes
from jaxmoe.scaling.initialize import parameter_table

COUNT, RANK = 4, 3
MODEL = ModelConfig(
    vocab_size=16,
    num_layers=2,
    embed_dim=12,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=6),
    moe=MoEConfig(num_experts=2, top_k=1, expert_dim=10),
)
ROWS = {
    path: row
    for path, row in stacked_rows(parameter_table(MODEL)).items()
    if path.endswith(("attention/out", "experts/gate_up"))
}


def terms(signs, left, right, size):
    """Numpy's sum of one block, bit by bit."""
    product = left.astype(np.float32) @ right.astype(np.float32)
    flat = product.reshape(-1, product.shape[-2] * product.shape[-1])
    out = np.empty_like(flat)
    for group, row in enumerate(flat):
        packed = signs.reshape(len(flat), -1)[group]
        for i in range(size):
            positive = packed[i // 8] >> (7 - i % 8) & 1
            out[group, i] = row[i] if positive else -row[i]
    return out.reshape(product.shape)


@pytest.fixture(scope="module")
def stacks():
    """Values, blocks and norms of two parameters of two layers."""
    rng, split = np.random.default_rng(0), jax.jit(decompose, static_argnames=("count", "rank"))
    values, scales, of_layers, norms = {}, {}, {}, {}
    for path, row in ROWS.items():
        shape = stacked_shape(row)
        values[path] = rng.standard_normal(row.shape).astype(np.float32)
        squares = rng.uniform(0.1, 30.0, shape[:-1])
        scales[path] = scales_of(squares).astype(np.float32)
        for layer in range(shape[0]):
            matrix = values[path].reshape(shape)[layer]
            blocks, norms[path, layer] = split(matrix, scales[path][layer], count=COUNT, rank=RANK)
            of_layers[path, layer] = blocks.replace(layers=np.full(COUNT, layer, np.int32))
    order = [owner for _ in range(COUNT) for owner in rng.permutation(list(of_layers)).tolist()]
    order = [(path, int(layer)) for path, layer in order]
    blocks = sort_blocks(of_layers, order)
    whole = {path: BitStack(scales=scales[path], blocks=blocks[path]) for path in ROWS}
    return values, whole, norms, order


def test_residual_strictly_falls(stacks):
    _, _, norms, _ = stacks
    for owner, own in norms.items():
        assert (np.diff([1.0, *np.asarray(own).tolist()]) < 0.0).all(), (owner, own)


def test_prefix_is_the_truncated_sum(stacks):
    _, whole, _, order = stacks
    for count in (0, 1, 5, len(order)):
        for path, row in ROWS.items():
            cut = prefix(whole[path], count)
            shape = stacked_shape(row)
            wanted = np.zeros(shape, np.float32)
            blocks = jax.device_get(whole[path].blocks)
            for i, place in enumerate(blocks.places):
                if place < count:
                    assert order[place] == (path, blocks.layers[i])
                    part = terms(
                        blocks.signs[i], blocks.left[i], blocks.right[i], shape[-1] * shape[-2]
                    )
                    wanted[blocks.layers[i]] += part
            wanted /= whole[path].scales[..., None]
            found = expand(row, cut, jnp.float32)
            np.testing.assert_allclose(found, wanted.reshape(row.shape), rtol=1e-5, atol=1e-6)


def test_more_blocks_are_nearer_and_one_is_added_as_in_the_sum(stacks):
    values, whole, _, _ = stacks
    for path, row in ROWS.items():
        errors, value = [], jnp.zeros(row.shape, jnp.float32)
        for number in range(whole[path].blocks.places.size):
            value = add_block(value, row, whole[path], number)
            errors.append(np.linalg.norm(np.asarray(value) - values[path]))
        np.testing.assert_allclose(
            value, expand(row, whole[path], jnp.float32), rtol=1e-5, atol=1e-6
        )
        assert errors[-1] < 0.35 * np.linalg.norm(values[path])


def test_bytes_are_those_of_the_formula(stacks):
    _, whole, _, _ = stacks
    for path, row in ROWS.items():
        blocks = whole[path].blocks
        assert stored_bytes(blocks) == blocks.places.size * block_bytes(stacked_shape(row), RANK)
    # Bits of a value and block: 1 + 16 k (m + n) / (m n), and 8 bytes for layer and place.
    assert (block_bytes((1, 4096, 4096), 16) - 8) * 8 / 4096**2 == 1.125


def test_scales_follow_the_norms():
    scales = scales_of(np.asarray([[4.0, 16.0], [0.0, 0.0]]))
    np.testing.assert_allclose(scales, np.asarray([[2 / 3, 4 / 3], [1.0, 1.0]]) + 1e-3)


def test_a_block_of_full_rank_is_the_matrix():
    """Signs times |W| is W, but for the rounding of the factors to float16."""
    matrix = jax.random.normal(jax.random.key(0), (2, 7, 5))
    _, norms = decompose(matrix, jnp.ones((2, 7)), count=1, rank=5)
    assert float(norms[0]) < 2e-3
