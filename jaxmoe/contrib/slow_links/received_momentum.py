# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Adam whose first moment arrives from outside after some updates (1-bit Adam, arXiv 2102.02888).

    update t <= after    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    later                m = what is given,       v stays

    direction = m / (1 - b1^t) / (sqrt(v / (1 - b2^min(t, after))) + epsilon)

The corrections of the bias go on as in Adam, so that the directions have no jump where v freezes.
Published code has none in either phase.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jaxmoe.optim import AdamWConfig, GroupMembers
from jaxmoe.optim.steps import spread, straight_steps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReceivingAdamW(AdamWConfig):
    """AdamW that takes first moments in place of gradients after some updates."""

    stays_finite: ClassVar[bool] = False  # the second moments do not follow

    after: int
    """Updates from gradients."""

    @classmethod
    def of(cls, optimizer: AdamWConfig, after: int) -> ReceivingAdamW:
        """Return AdamW with the numbers of a run.

        Args:
            optimizer: Optimiser of the run.
            after: Updates from gradients, after which the second moments stay.
        """
        return cls(**dataclasses.asdict(optimizer), after=after)

    def transformation(self, members: GroupMembers) -> optax.GradientTransformation:
        """Return the steps for the group."""
        directions = received_momentum(
            self.after,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=members.tree(lambda row: row.hyper.epsilon_multiplier * self.epsilon),
        )
        return straight_steps(
            directions,
            members.rate,
            weight_decay=members.decays(self.weight_decay),
            multiplier=members.multipliers(),
        )


# Not checked at run time: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
class ReceivedMoments(NamedTuple):
    """Moments of `received_momentum`."""

    count: Int[Array, ""]
    """Updates so far."""
    mu: Any
    nu: Any


def received_momentum(
    after: int, *, beta1: float, beta2: float, epsilon: Any
) -> optax.GradientTransformation:
    """Return the transformation from gradients, later first moments, to Adam's directions.

    Args:
        after: Updates before the first moment is given.
        beta1: Decay rate for the first moment.
        beta2: Decay rate for the second moment.
        epsilon: Number added to the root of the second moment, or a tree of numbers.
    """

    def init(params: Any) -> ReceivedMoments:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return ReceivedMoments(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        is_own = count <= after

        def first(m: Array, g: Array) -> Array:
            return jnp.where(is_own, beta1 * m + (1.0 - beta1) * g, g)

        def second(v: Array, g: Array) -> Array:
            return jnp.where(is_own, beta2 * v + (1.0 - beta2) * g**2, v)

        mu = jax.tree.map(first, state.mu, updates)
        nu = jax.tree.map(second, state.nu, updates)
        share1 = 1.0 - beta1 ** count.astype(jnp.float32)
        share2 = 1.0 - beta2 ** jnp.minimum(count, after).astype(jnp.float32)

        def direction(m: Array, v: Array, epsilon: float) -> Array:
            root = jnp.sqrt(v / share2.astype(v.dtype))
            return m / share1.astype(m.dtype) / (root + epsilon)

        directions = jax.tree.map(direction, mu, nu, spread(epsilon, mu))
        return directions, ReceivedMoments(count, mu, nu)

    return optax.GradientTransformation(init, update)


def received_moments(opt_state: Any) -> ReceivedMoments:
    """Return the moments in the state of an optimiser that has `received_momentum` once.

    Args:
        opt_state: State of the optimiser.
    """

    def is_it(node: Any) -> bool:
        return isinstance(node, ReceivedMoments)

    (state,) = (node for node in jax.tree.leaves(opt_state, is_leaf=is_it) if is_it(node))
    return state
