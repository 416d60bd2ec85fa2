# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs each sequence of a batch along its own path: a layer is skipped, run, or run twice.

    path   one of SKIP, RUN, REPEAT for each layer that a token passes through
    SKIP   h;   RUN   f(h);   REPEAT   f(f(h))

The first half of the tokens of a sequence is its prompt, from which a router may decide; the loss
is that of the other half. A sequence that leaves a layer out is not routed to its experts.

Source: Dr.LLM, arXiv 2510.12773.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.contrib.layerwise.chain import Chain
from jaxmoe.data import Batch
from jaxmoe.layers.records import Stream
from jaxmoe.training.cross_entropy import token_nll

SKIP, RUN, REPEAT = range(3)
"""Choices of a layer; each is the number of times that the layer runs."""
WINDOWS: Final = 8
"""Windows of the prompt whose mean hidden states a router reads."""

Choose = Callable[[int, Float[Array, "B 8 D"]], Int[np.ndarray, " B"]]
"""Function of the place of a layer and the windows before it; returns the choice of each row."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoutedRows:
    """Sequences that have run along their paths."""

    paths: Int[np.ndarray, "B layers"]
    """Choice for each layer."""
    losses: Float[np.ndarray, " B"]
    """Loss of the second half of each sequence, in nats per token."""
    windows: Float[np.ndarray, "B layers 8 D"]
    """Mean hidden states of the windows of the prompt, before each layer."""


def along_paths(chain: Chain, batch: Batch, paths: Int[np.ndarray, "B layers"]) -> RoutedRows:
    """Return the results of given paths.

    Args:
        chain: Causal model on one device.
        batch: Sequences.
        paths: SKIP, RUN or REPEAT for each sequence and layer.
    """
    return run_rows(chain, batch, lambda layer, _: paths[:, layer])


def run_rows(chain: Chain, batch: Batch, choose: Choose) -> RoutedRows:
    """Return the results of paths that are chosen layer by layer.

    Args:
        chain: Causal model on one device.
        batch: Sequences.
        choose: Choice of each row for a layer.
    """
    stream, inputs = chain.begin(batch.tokens, batch.segment_ids)
    token_mask = inputs.token_mask
    paths = []
    windows = []
    for layer, call in enumerate(chain.calls):
        windows.append(pool_windows(chain.hidden(stream), token_mask))
        paths.append(choose(layer, windows[-1]))
        for times in (RUN, REPEAT):
            is_on = paths[-1] >= times
            if not is_on.any():
                break
            layer_inputs = inputs
            if not is_on.all():
                layer_inputs = dataclasses.replace(inputs, token_mask=token_mask & is_on[:, None])
            after = chain.call(call, stream, layer_inputs)
            stream = after if is_on.all() else _where_rows(is_on, after, stream)
    losses = _losses(chain.logits(stream), batch, prompt_mask(token_mask))
    return RoutedRows(
        paths=np.stack(paths, axis=1),
        losses=np.asarray(losses, np.float64),
        windows=np.stack(jax.device_get(windows), axis=1),
    )


def num_predicted(batch: Batch) -> Float[np.ndarray, " B"]:
    """Return the summed weights of the predictions that the loss of each row is the mean of."""
    segments = batch.segment_ids
    is_real = jnp.ones_like(batch.tokens, bool) if segments is None else segments != 0
    return np.asarray(jnp.sum(_weights(batch, prompt_mask(is_real)), axis=1))


@jax.jit
def prompt_mask(token_mask: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
    """Return which tokens are the first half of their row's.

    Args:
        token_mask: False for padding.
    """
    rank = jnp.cumsum(token_mask, axis=1, dtype=jnp.int32)
    return token_mask & (2 * rank <= rank[:, -1:])


@jax.jit
def pool_windows(hidden: Float[Array, "B S D"], token_mask: Bool[Array, "B S"]) -> Array:
    """Return the mean of each window of the prompts [B 8 D], f32; 0 for a window without tokens.

    Args:
        hidden: Hidden states.
        token_mask: False for padding, which changes nothing.
    """
    is_prompt = prompt_mask(token_mask)
    rank = jnp.cumsum(is_prompt, axis=1, dtype=jnp.int32) - 1
    number = jnp.maximum(rank[:, -1:] + 1, 1)
    window = jnp.where(is_prompt, rank * WINDOWS // number, -1)
    member = jax.nn.one_hot(window, WINDOWS, dtype=jnp.float32)
    sums = jnp.einsum(
        "bsw,bsd->bwd", member, hidden.astype(jnp.float32), preferred_element_type=jnp.float32
    )
    return sums / jnp.maximum(jnp.sum(member, axis=1), 1.0)[..., None]


@jax.jit
def _where_rows(is_on: Any, after: Stream, before: Stream) -> Stream:
    """Return the stream after a layer for some rows, and that before it for the others."""

    def chosen(new: Array, old: Array) -> Array:
        if not new.ndim:  # a flag that the next layer sets again
            return new
        return jnp.where(jnp.reshape(is_on, (-1, *[1] * (new.ndim - 1))), new, old)

    return jax.tree.map(chosen, after, before)


@jax.jit
def _losses(logits: Float[Array, "B S V"], batch: Batch, is_prompt: Bool[Array, "B S"]) -> Array:
    weights = _weights(batch, is_prompt)
    nll = token_nll(logits, jnp.asarray(batch.targets))
    return jnp.sum(nll * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1e-9)


def _weights(batch: Batch, is_prompt: Bool[Array, "B S"]) -> Array:
    return jnp.where(is_prompt, 0.0, batch.loss_weights)
