# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Expert-router coupling (ERC): a loss that makes each router row activate its own expert most.

    eps_i = min over j != i of |R_i - R_j| / (2 |R_i|)       R_i: router row of expert i, D wide
    P_i   = R_i * uniform(1 - eps_i, 1 + eps_i)              proxy for the tokens of i
    M_ij  = |P_i W_j|                                         W_j: gate projection of expert j
    L     = 1/E^2 sum over i != j of max(M_ij - alpha M_ii, 0) + max(M_ji - alpha M_ii, 0)

P_i is never nearer to another row than to its own. The cost, 2 E^2 D F, does not depend on the
batch. Tokens are routed by R itself. alpha = 1 suits few experts, 0.5 many: smaller is stricter.

Source: arXiv 2512.23447, by secondary accounts. Readings chosen: eps has no gradient, the
coefficient is 1. The rows of experts without computation enter eps but not M.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.balancers.base import WeightsBalancer
from jaxmoe.routing.base import Arrays, Key

# Distinct from the token numbers that `routers/noise.py` folds into the same key.
_FOLD = 2**32 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CouplingConfig(WeightsBalancer):
    """Expert-router coupling loss of the weights; for routers with one matrix `weight`."""

    name: ClassVar[str] = "coupling"
    router_parameters: ClassVar[tuple[str, ...]] = ("weight",)

    coefficient: float = 1.0
    """Weight in the loss, per layer."""
    alpha: float = 1.0
    """Share of an expert's own response that no other response may exceed, from 0 to 1."""

    def __post_init__(self):
        WeightsBalancer.__post_init__(self)
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha={self.alpha} of coupling must lie between 0 and 1")

    def coupling(self, router: Arrays, experts: Arrays, key: Key) -> Float[Array, ""]:
        """Return the weighted loss of one layer.

        Raises:
            ValueError: `key` is None.
        """
        if key is None:
            raise ValueError("the balancer coupling draws random numbers in training: give `key`")
        gate = experts["gate_up"][:, :, 0, :].astype(jnp.float32)  # E, D, F
        rows = router["weight"].astype(jnp.float32).T  # routed experts, D
        proxies = proxy_rows(rows, jax.random.fold_in(key, _FOLD))[: gate.shape[0]]
        return self.coefficient * coupling_loss(response_norms(proxies, gate), self.alpha)


def proxy_rows(rows: Float[Array, "E D"], key: Array) -> Float[Array, "E D"]:
    """Return each row times noise that keeps it nearer to itself than to any other row.

    Args:
        rows: Router rows, f32; eps has no gradient in them.
        key: Key of the layer and step, the same on every device.
    """
    still = jax.lax.stop_gradient(rows)
    number = rows.shape[0]
    squares = jnp.sum(still**2, axis=-1)
    apart = jnp.sum((still[:, None, :] - still[None, :, :]) ** 2, axis=-1)
    nearest = jnp.min(jnp.where(jnp.eye(number, dtype=bool), jnp.inf, apart), axis=1)
    # A single expert has no other row, and gets no noise.
    nearest = jnp.where(jnp.isfinite(nearest), nearest, 0.0)
    epsilon = jnp.sqrt(nearest / jnp.maximum(squares, 1e-30)) / 2.0
    noise = jax.random.uniform(key, rows.shape, jnp.float32, -1.0, 1.0)
    return rows * (1.0 + epsilon[:, None] * noise)


def response_norms(
    proxies: Float[Array, "E D"], gate: Float[Array, "e D F"]
) -> Float[Array, "E e"]:
    """Compute M, the norm of each proxy (row) after each expert's gate projection (column), f32.

    Where experts are spread over devices, each device computes its columns.
    """

    @jax.checkpoint
    def of_expert(projection: Float[Array, "D F"]) -> Float[Array, " E"]:
        response = jnp.einsum("id,df->if", proxies, projection, preferred_element_type=jnp.float32)
        # Bounded away from 0, where the slope of the square root is infinite.
        return jnp.sqrt(jnp.maximum(jnp.sum(response**2, axis=-1), 1e-30))

    # One expert at a time: all at once would hold E * E * F numbers.
    return jax.lax.map(of_expert, gate).T


def coupling_loss(norms: Float[Array, "E E"], alpha: float) -> Float[Array, ""]:
    """Compute the unweighted loss: 0 if each alpha M_ii is the largest in its row and column."""
    number = norms.shape[0]
    diagonal = alpha * jnp.diagonal(norms)[:, None]
    above = jnp.maximum(norms - diagonal, 0.0) + jnp.maximum(norms.T - diagonal, 0.0)
    return jnp.sum(jnp.where(jnp.eye(number, dtype=bool), 0.0, above)) / number**2
