# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the tables by which a step predicts each token's device (`token_shuffle.py`).

From a trace and any placement: P(device | token id) and P(device | device in the layer below), with
only the likeliest device and its probability.

Source: Speculative MoE (arXiv 2503.04398): s-TS. Reading: the 2-gram is over layers, the only
earlier devices that are known when a token is shuffled.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmoe.contrib.placement.measures import experts_devices, homes
from jaxmoe.contrib.token_routes.token_shuffle import TokenTables
from jaxmoe.routing.telemetry.trace import RoutingTrace
from sharding.expert_parallel.placement import ExpertPlacement


def token_tables(
    trace: RoutingTrace, placement: ExpertPlacement, *, vocab_size: int
) -> TokenTables:
    """Return tables that predict each token's device from a trace.

    Args:
        trace: Routing trace to count in.
        placement: Placement of the experts.
        vocab_size: V; ids that the trace lacks get confidence 0.
    """
    number = placement.num_devices
    layers = trace.num_layers
    devices = experts_devices(trace, placement)
    before = homes(trace, placement)
    by_id = []
    by_device = []
    for layer in range(layers):
        table = np.zeros((vocab_size, number + 1))
        np.add.at(table, (trace.token_ids[:, None], devices[layer]), 1.0)
        by_id.append(table[:, :-1])
        # The last row counts tokens without an expert below, and all of the first layer.
        table = np.zeros((number + 1, number + 1))
        below = before[layer - 1] if layer else np.full(trace.num_tokens, -1)
        np.add.at(table, (below[:, None], devices[layer]), 1.0)
        by_device.append(table[:-1, :-1])
    (id_device, id_confidence), (next_device, next_confidence) = (
        _likeliest(np.stack(tables)) for tables in (by_id, by_device)
    )
    return TokenTables(
        id_device=id_device,
        id_confidence=id_confidence,
        next_device=next_device,
        next_confidence=next_confidence,
    )


def _likeliest(counts: Float[np.ndarray, "L n P"]) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Return the device with the largest count in each row, and its share; 0 without counts."""
    share = counts.max(-1) / np.maximum(counts.sum(-1), 1.0)
    return jnp.asarray(counts.argmax(-1), jnp.int32), jnp.asarray(share, jnp.float32)
