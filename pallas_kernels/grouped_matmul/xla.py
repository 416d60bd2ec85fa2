# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""grouped_matmul without a kernel: one batched product, then a loop over what overflows.

XLA turns jax.lax.ragged_dot into G dense products on the CPU, and a loop over blocks of rows packs
the group's matrix again for every block. So the rows are laid out in two parts:

    head       the first C rows of every group, gathered to [G C k] and multiplied in one batched
               product; C is a little more than R / G, so balanced groups lie wholly in the head
    overflow   the rows of a group beyond C, in blocks, in a loop that runs as often as the sizes of
               this call ask for: not at all where no group is larger than C

A group that overflows has more than C rows, and blocks have at most C, so that the last block of a
group slides back until it ends with the group: no block ever reads or writes the rows of another
group. Every shape is static, and nothing is scattered.

    out = rows @ W[g]    d rows = d out @ W[g]^T    d W[g] = sum over the rows of g of rows^T d out

The gradient of the rows is the same product with the matrices turned; that of the weights adds the
blocks of the overflow to the batched product in place. It runs everywhere and is tuned on the CPU,
where the batched product has the dense rate and a block of overflow about half of it: balanced
groups are fast, and one group that holds everything takes about twice the dense time.

To tune it for another machine, measure SLACK and BLOCKS anew, with balanced and with skewed groups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int

# Rows beyond R / G in the head, as a fraction: a router's counts scatter by a few percent around
# the mean, and a block of overflow costs more than the head's extra rows.
SLACK = 1 / 16
# Rows in one block of overflow. Large blocks carry most rows of a large group, small ones the rest:
# whatever its size, a block costs about 70 rows more, because the matrix is packed again.
BLOCKS = (512, 128)
# A head smaller than this would leave small, uneven groups to the loop.
MIN_HEAD = 32


class _Layout(NamedTuple):
    starts: Int[Array, " G"]  # first row of every group
    sizes: Int[Array, " G"]
    ids: Int[Array, " R"]  # group of every row, G past the last group
    slots: Int[Array, "G C"]  # row at every place of the head, clamped to the last row
    is_filled: Array  # [G C 1], whether that row belongs to the group
    has_group: Array  # [R 1]


def _lay_out(num_rows: int, group_sizes: Array) -> _Layout:
    num_groups = group_sizes.shape[0]
    head = min(num_rows, max(MIN_HEAD, int(num_rows / num_groups * (1 + SLACK))))
    ends = jnp.minimum(jnp.cumsum(group_sizes), num_rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    sizes = ends - starts
    ids = jnp.searchsorted(ends, jnp.arange(num_rows), side="right")
    places = jnp.arange(head)[None]
    return _Layout(
        starts=starts,
        sizes=sizes,
        ids=ids,
        slots=jnp.minimum(starts[:, None] + places, num_rows - 1),
        is_filled=(places < sizes[:, None])[:, :, None],
        has_group=(ids < num_groups)[:, None],
    )


def _over_blocks(layout: _Layout, body, carry: Array) -> Array:
    """Calls body(carry, group, first row, rows, rows seen before) for every block of overflow."""
    head = layout.slots.shape[1]
    done = jnp.minimum(layout.sizes, head)
    blocks = [min(block, head) for block in BLOCKS]
    for block in blocks:
        left = layout.sizes - done
        counts = -(-left // block) if block == blocks[-1] else left // block
        ends = jnp.cumsum(counts)

        def step(i, carry, block=block, counts=counts, ends=ends, done=done):
            group = jnp.searchsorted(ends, i, side="right")
            new = done[group] + (i - ends[group] + counts[group]) * block
            first = jnp.minimum(new, layout.sizes[group] - block)
            start = layout.starts[group]
            return body(carry, group, start + first, block, new - first)

        carry = jax.lax.fori_loop(0, ends[-1], step, carry)
        done = done + counts * block
    return carry


def _product(rows: Array, weights: Array, layout: _Layout, turned: bool) -> Array:
    num_groups, head = layout.slots.shape
    equation = "crn,ckn->crk" if turned else "crk,ckn->crn"

    def multiply(blocks: Array, matrices: Array) -> Array:
        out = jnp.einsum(equation, blocks, matrices, preferred_element_type=jnp.float32)
        return out.astype(rows.dtype)

    products = multiply(rows[layout.slots], weights)
    products = products.reshape(num_groups * head, products.shape[-1])
    group = jnp.minimum(layout.ids, num_groups - 1)
    place = jnp.minimum(jnp.arange(rows.shape[0]) - layout.starts[group], head - 1)
    out = products[group * head + place]
    out = jnp.where(layout.has_group, out, jnp.zeros_like(out))

    def add_block(out: Array, group: Array, first: Array, block: int, _: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(rows, first, block)
        product = multiply(own[None], jax.lax.dynamic_slice_in_dim(weights, group, 1))[0]
        return jax.lax.dynamic_update_slice_in_dim(out, product, first, 0)

    return _over_blocks(layout, add_block, out)


def _weight_gradient(rows: Array, d_out: Array, layout: _Layout) -> Array:
    def contract(rows: Array, d_out: Array) -> Array:
        return jnp.einsum("crk,crn->ckn", rows, d_out, preferred_element_type=jnp.float32)

    # Both are masked: what stands past the last group may be NaN.
    head_rows, head_d_out = (
        jnp.where(layout.is_filled, x[layout.slots], jnp.zeros((), x.dtype)) for x in (rows, d_out)
    )

    def add_block(total: Array, group: Array, first: Array, block: int, seen: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(rows, first, block)
        own_d_out = jax.lax.dynamic_slice_in_dim(d_out, first, block)
        is_new = (jnp.arange(block) >= seen)[:, None]
        own_d_out = jnp.where(is_new, own_d_out, jnp.zeros_like(own_d_out))
        old = jax.lax.dynamic_slice_in_dim(total, group, 1)
        new = old + contract(own[None], own_d_out[None])
        return jax.lax.dynamic_update_slice_in_dim(total, new, group, 0)

    return _over_blocks(layout, add_block, contract(head_rows, head_d_out))


@jax.custom_vjp
def grouped_matmul(
    rows: Float[Array, "R k"], weights: Float[Array, "G k n"], group_sizes: Int[Array, " G"]
) -> Float[Array, "R n"]:
    """See `pallas_kernels.grouped_matmul`."""
    return _product(rows, weights, _lay_out(rows.shape[0], group_sizes), turned=False)


def _forward(rows, weights, group_sizes):
    return grouped_matmul(rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(residuals, d_out):
    rows, weights, group_sizes = residuals
    layout = _lay_out(rows.shape[0], group_sizes)
    d_rows = _product(d_out, weights, layout, turned=True)
    d_weights = _weight_gradient(rows, d_out, layout)
    return d_rows, d_weights.astype(weights.dtype), None


grouped_matmul.defvjp(_forward, _backward)
