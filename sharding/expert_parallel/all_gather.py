# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The all-gather dispatcher: every device sees all tokens and computes those of its own experts.

The devices of `ExpertAxes.expert` and `expert_tensor`, P in all, share their T tokens before
dispatch and add up their sums afterwards; both happen in `expert_parallel`. Each device receives

    (P - 1) T (D values + 2 K numbers)     tokens, ids and gates, all-gathered
    (P - 1) T D values                     sums, reduce-scattered

and as much in the backward pass, independent of K and of the load balance. An all-to-all moves
(P - 1)/P K T D values each way, less where P > K. Dropless. A device allocates the worst case,
P T min(K, e) rows with e = E / P experts.

Choose it for few devices with fast links, a large K, or very uneven routing.

`ResidentConfig` is the same without the gather, for serving, which computes one row of tokens that
no mesh axis cuts: all tokens are on every device. Weights of experts stay where they are and no
token travels; each device receives 2 (P - 1) / P T D values of the sum.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from sharding.expert_parallel.dispatched import Dispatched, Outgoing
from sharding.expert_parallel.dispatcher import Dispatcher, DispatcherTraits
from sharding.expert_parallel.permute import move_rows, sort_by_expert


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherConfig(Dispatcher):
    """Tokens are gathered to the experts, sums are scattered back."""

    name: ClassVar[str] = "all_gather"
    traits: ClassVar[DispatcherTraits] = DispatcherTraits(gathers_tokens=True)

    @property
    def keeps_rows(self) -> bool:
        """False: the gathered tokens are kept."""
        return False

    def dispatch(self, outgoing: Outgoing) -> Dispatched:
        """Sort, from the rows of all devices, those of the experts held here."""
        axes = outgoing.axes
        num_local = axes.experts_held(outgoing.num_experts)
        mine = outgoing.expert_ids.astype(jnp.int32) - jax.lax.axis_index(axes.expert) * num_local
        order = sort_by_expert(
            jnp.where((mine >= 0) & (mine < num_local), mine, num_local), num_local
        )
        most = outgoing.most_for_groups(num_local)
        read = order.group_sizes.sum()
        places = jnp.arange(most, dtype=jnp.int32)
        sources = jnp.where(places < read, order.order[:most], mine.shape[0])
        targets = jnp.where(order.inverse < read, order.inverse, most)
        return Dispatched(
            rows=move_rows(outgoing.rows, sources, targets),
            group_sizes=order.group_sizes,
            gates=move_rows(outgoing.gates, sources, targets)[:, 0],
            weights=outgoing.weights,
            undo=lambda outputs: move_rows(outputs, targets, sources),
            dropped=outgoing.none_dropped(),
            indices=outgoing.indices_of(sources, targets),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResidentConfig(AllGatherConfig):
    """Tokens are whole on every device, sums are added up."""

    name: ClassVar[str] = "resident"
    traits: ClassVar[DispatcherTraits] = DispatcherTraits(has_whole_tokens=True)
