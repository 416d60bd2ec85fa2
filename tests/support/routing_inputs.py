# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Small router inputs: rows of tokens on one device, or spread over eight.

Tokens are ROWS rows of LENGTH; on eight devices rows are spread over (data, expert) and positions
over seq, two devices each.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxmoe.routing import Extent, RouterInputs, RouterOutput

ROWS, LENGTH, WIDTH = 4, 8, 5
TOKENS = ROWS * LENGTH


def drawn(seed: int, scale: float = 1.0, tokens: int = TOKENS, width: int = WIDTH) -> jax.Array:
    """Return normal activations [tokens width]."""
    values = np.random.default_rng(seed).normal(size=(tokens, width)) * scale
    return jnp.asarray(values, jnp.float32)


def inputs_of(
    x: jax.Array, *, mask: Any = None, index: Any = None, extent: Extent | None = None
) -> RouterInputs:
    """Return inputs of these tokens, numbered in order; their vocabulary ids repeat every 7."""
    index = jnp.arange(x.shape[0], dtype=jnp.int32) if index is None else index
    return RouterInputs(
        x=x,
        token_mask=jnp.ones(x.shape[0], bool) if mask is None else jnp.asarray(mask),
        segment_ids=jnp.ones(x.shape[0], jnp.int32),
        context={"index": index, "tokens": index % 7},
        extent=extent or Extent(sequence_length=LENGTH),
    )


@functools.partial(jax.jit, static_argnames=("router", "train", "extent"))
def _route(router, params, state, x, mask, index, key, *, train, extent):
    inputs = inputs_of(x, mask=mask, index=index, extent=extent)
    return router.route(params, state, inputs, train=train, key=key)


def route(
    router: Any,
    params: Any,
    x: jax.Array,
    *,
    state: Any = None,
    mask: Any = None,
    index: Any = None,
    train: bool = False,
    key: Any = None,
    extent: Extent | None = None,
) -> RouterOutput:
    """Run `router.route`, compiled; with a key in training."""
    key = jax.random.key(3) if key is None and train else key
    mask = jnp.ones(x.shape[0], bool) if mask is None else jnp.asarray(mask)
    index = jnp.arange(x.shape[0], dtype=jnp.int32) if index is None else jnp.asarray(index)
    state = {} if state is None else state
    return _route(router, params, state, x, mask, index, key, train=train, extent=extent)


def route_on_eight_devices(
    router: Any, params: Any, x: jax.Array, *, mask: Any = None, train: bool = True, key: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return expert ids and scores [TOKENS K] of tokens spread over data, expert and seq."""
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "expert", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    spread, whole = PartitionSpec(("data", "expert"), "seq"), PartitionSpec()
    extent = Extent(
        sequence_length=LENGTH // 2, sequence_axes=("seq",), batch_axes=("data", "expert")
    )
    key = jax.random.key(3) if key is None else key

    def local(params, key, x, mask, index):
        rows = index.shape
        given = (x.reshape(-1, x.shape[-1]), mask.reshape(-1), index.reshape(-1))
        output = _route(router, params, {}, *given, key, train=train, extent=extent)
        selection = output.selection
        return tuple(
            flat.reshape(*rows, router.top_k) for flat in (selection.expert_ids, selection.scores)
        )

    mask = jnp.ones(TOKENS, bool) if mask is None else jnp.asarray(mask)
    index = jnp.arange(TOKENS, dtype=jnp.int32).reshape(ROWS, LENGTH)
    with jax.set_mesh(mesh):
        ids, scores = jax.jit(
            jax.shard_map(
                local, in_specs=(whole, whole, spread, spread, spread), out_specs=(spread, spread)
            )
        )(params, key, x.reshape(ROWS, LENGTH, -1), mask.reshape(ROWS, LENGTH), index)
    shape = (TOKENS, router.top_k)
    return np.asarray(ids).reshape(shape), np.asarray(scores).reshape(shape)


def by_token(output: RouterOutput) -> tuple[np.ndarray, np.ndarray]:
    """Return expert ids and scores [T K]."""
    selection = output.selection
    assert selection.top_k is not None
    ids, scores = np.asarray(selection.expert_ids), np.asarray(selection.scores)
    return ids.reshape(-1, selection.top_k), scores.reshape(-1, selection.top_k)
