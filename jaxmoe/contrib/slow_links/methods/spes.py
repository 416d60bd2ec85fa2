# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""SPES: each worker trains its own experts, and takes the others as they are (arXiv 2602.11543).

Worker w of R owns the experts e with floor(e R / E) = w. Only these, and all other parameters, have
gradients on it; foreign experts take part in the forward pass, frozen. At an exchange experts come
from their owner, bit for bit, which sends no others; everything else is the plain mean. Optimiser
states never travel.

Until step `merging_steps` experts of a layer are drawn together every `merging_every` steps:

    w_e = w_e + a mean_{j in near(e)} (w_j - w_e),   a = merging (1 - step / merging_steps)

near(e) are the four experts whose first projections have the largest cosine with that of e, and all
matrices of an expert move. A worker holds the moments of its own experts alone, unless its mesh
cuts the experts (`jaxmoe/contrib/slow_links/workers/own_rows.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmoe.contrib.slow_links.base import ReplicasBase
from jaxmoe.contrib.slow_links.codec import Payload, plain
from jaxmoe.contrib.slow_links.exchange import (
    About,
    Decode,
    Exchange,
    gather_around,
    mean,
    no_state,
)
from jaxmoe.contrib.slow_links.expert_merging import ExpertMerging
from jaxmoe.contrib.slow_links.fragments import Leaf, TrainingFacts
from jaxmoe.contrib.slow_links.method import Method
from jaxmoe.contrib.slow_links.ownership import Ownership
from jaxmoe.contrib.slow_links.timing import ExchangeTiming
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpesConfig(ReplicasBase):
    """Trains each expert on one worker, and averages everything else."""

    name: ClassVar[str] = "spes"

    every: int = 100
    """Steps between two exchanges."""
    merging: float = 0.01
    """How far experts move to their nearest ones in the first merging; 0 never merges."""
    merging_every: int = 500
    """Steps between two mergings of experts; a multiple of `every`."""
    merging_steps: int = 10_000
    """Steps until experts are no longer merged; the distance falls linearly."""
    nearest: int = 4
    """Experts to which an expert is drawn."""

    def __post_init__(self):
        ReplicasBase.__post_init__(self)
        if not 0.0 <= self.merging <= 1.0:
            raise ValueError(f"replicas.merging={self.merging} must lie in [0, 1]")
        if self.merging > 0.0 and (
            self.merging_every < 1 or self.every < 1 or self.merging_every % self.every != 0
        ):
            raise ValueError(
                f"replicas.merging_every={self.merging_every} must be a multiple of"
                f" replicas.every={self.every}: experts are merged at exchanges"
            )
        if self.merging_steps < 1 or self.nearest < 1:
            raise ValueError(
                f"replicas.merging_steps={self.merging_steps} and"
                f" replicas.nearest={self.nearest} must be at least 1"
            )

    def build(self, facts: TrainingFacts) -> Method:
        """Return the method; see the base class.

        Raises:
            ValueError: There are fewer experts than workers.
        """
        counts = [leaf.shape[_experts(leaf)] for leaf in facts.leaves if ax.EXPERTS in leaf.axes]
        if not counts or min(counts) < facts.workers:
            raise ValueError(
                f"replicas 'spes' needs an expert for each of {facts.workers} workers, the model"
                f" has {min(counts, default=0)}: use fewer workers or a model with more experts"
            )

        owned = Ownership(workers=facts.workers, axis=ax.EXPERTS)
        merging = ExpertMerging(
            leaves={leaf.path: leaf for leaf in facts.leaves if ax.EXPERTS in leaf.axes},
            rate=self.merging,
            every=self.merging_every,
            steps=self.merging_steps,
            nearest=self.nearest,
        )

        def finish(slow: dict[str, Array], number: Int[Array, ""]) -> dict[str, Array]:
            # The exchange after the last step may come before its turn: experts stay then.
            step = (number + 1) * self.every
            return merging.apply(slow, jnp.where(step > facts.steps, self.merging_steps, step))

        return Method(
            timing=ExchangeTiming(every=self.every),
            codec=lambda leaf: plain(),
            exchange=lambda leaf: (
                from_owner(owned, leaf.shape[_experts(leaf)]) if ax.EXPERTS in leaf.axes else mean()
            ),
            outer=None,
            anchor="merged",
            owned=owned,
            finish=finish if self.merging > 0.0 else None,
        )


def from_owner(owned: Ownership, experts: int) -> Exchange:
    """Return the exchange in which each expert comes from the worker that owns it.

    Workers send their own experts only, as they are, each to all others in a ring. Where the number
    of workers does not divide that of experts, all send as many as the one with the most.

    Args:
        owned: Workers to whom experts belong.
        experts: Number of experts.
    """

    def mix(payload: Payload, decode: Decode, slow: Array, setting: About, state: Any) -> Any:
        decoded = jnp.moveaxis(decode(payload, slow), setting.axes.index(ax.EXPERTS), 0)
        names = setting.split[setting.axes.index(ax.EXPERTS)]
        num_local = decoded.shape[0]
        total = num_local * (jax.lax.axis_size(names) if names else 1)
        first = num_local * jax.lax.axis_index(names) if names else 0
        sent = min(owned.most(total), num_local)
        # Where each worker's experts begin in what a device holds of them.
        begin = -(-jnp.arange(setting.workers) * total // setting.workers) - first
        begin = jnp.clip(begin, 0, num_local - sent)
        mine = begin[jax.lax.axis_index(setting.axis)]
        rows = jax.lax.dynamic_slice_in_dim(decoded, mine, sent)
        rows = gather_around(rows, setting).reshape(-1, *decoded.shape[1:])
        number = jnp.arange(num_local)
        owner = owned.owner(first + number, total)
        owner_rows = jnp.take(rows, owner * sent + number - begin[owner], axis=0)
        return jnp.moveaxis(owner_rows, 0, setting.axes.index(ax.EXPERTS)), state

    def copies(workers: int) -> float:
        return (workers - 1) * owned.most(experts) / experts

    return Exchange(init=no_state, mix=mix, copies=copies)


def _experts(leaf: Leaf) -> int:
    """Return the dimension of a parameter that counts experts."""
    return leaf.axes.index(ax.EXPERTS)
