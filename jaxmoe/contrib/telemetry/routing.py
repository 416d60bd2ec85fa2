# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Detailed routing statistics, collected with `ExecutionConfig(telemetry="detailed")`.

All are sums over tokens in `RouterStatistics.extra`, reduced with the other statistics over devices
and micro-batches (M: tokens by experts, 0 or 1; p: probabilities):

    detail_margin         sum of p_(K) - p_(K+1), the K-th and next largest
    detail_top1           sum of the largest p
    detail_mass           sum of p over the chosen experts
    detail_log_prob       sum of log p, per expert: the quality that `congestion.py` fits
    detail_coactivation   M^T M; its diagonal is the counts, its rows sum to K times them
    detail_domains        counts per domain, from context["domain"]; other domains in the last row
    detail_z              histogram of |logsumexp| over powers of sqrt(2), for its maximum

`summarise_detailed` computes scalars from them, among these

    mutual information    I(token; expert) = H(P) - mean H(p) >= 0, nats
    domain information    2 I(domain; expert) / (H(domain) + H(expert))

The margin is that of the probabilities, before any bias. `z_max` is the upper edge of the highest
bin that is not empty: at most a factor sqrt(2) too large.

To add a statistic: an additive entry in `observe` and its scalar in `summarise_detailed`, both in
`jaxmoe/contrib/telemetry/routing.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxmoe.routing.base import Arrays, RouterInputs, RouterOutput, RouterStatistics

NUM_DOMAINS = 16
"""Rows of `detail_domains`: one each for domains 0 to 14, one for all others."""
Z_BINS = 64
Z_LOWEST = -16
"""Bins of `detail_z`, and the power of 2 at the upper edge of the first."""


def observe(output: RouterOutput, inputs: RouterInputs) -> Arrays:
    """Compute the additive statistics of this device's tokens, without gradient and padding.

    Args:
        output: Output of the router, before capacity.
        inputs: Tokens, with `context["domain"] [T] i32` where domains are known.
    """
    probs, logits = jax.lax.stop_gradient((output.probs, output.logits))
    num_experts = probs.shape[1]
    is_real = inputs.token_mask
    best, _ = jax.lax.top_k(probs, probs.shape[1])
    log_probs = jnp.log(jnp.maximum(probs, jnp.finfo(jnp.float32).tiny))
    size = jnp.abs(jax.nn.logsumexp(logits, axis=-1))
    place = jnp.ceil(2.0 * jnp.log2(jnp.maximum(size, 1e-30))) - 2.0 * Z_LOWEST
    sums = {
        "detail_top1": jnp.sum(best[:, 0], where=is_real),
        "detail_log_prob": jnp.sum(log_probs, axis=0, where=is_real[:, None]),
        "detail_z": _count(jnp.clip(place, 0.0, Z_BINS - 1.0), is_real, Z_BINS),
    }
    selection = output.selection
    if output.slots is not None or selection.top_k is None:
        return sums
    ids = selection.expert_ids.reshape(-1, selection.top_k, 1)  # T, K
    experts = jnp.arange(num_experts, dtype=ids.dtype)
    chosen = (ids == experts[None, None, :]).sum(1).astype(jnp.float32)  # T, E
    rank = min(selection.top_k, num_experts - 1)
    margin = best[:, rank - 1] - best[:, rank] if rank else best[:, 0]
    sums |= {
        "detail_margin": jnp.sum(margin, where=is_real),
        "detail_mass": jnp.sum(jnp.where(chosen > 0.0, probs, 0.0)),
        "detail_coactivation": _products(chosen, chosen),
    }
    domain = inputs.context.get("domain")
    if domain is not None:
        domain = jnp.where((domain < 0) | (domain >= NUM_DOMAINS), NUM_DOMAINS - 1, domain)
        rows = domain[:, None] == jnp.arange(NUM_DOMAINS, dtype=domain.dtype)[None, :]
        sums["detail_domains"] = _products(rows.astype(jnp.float32), chosen)
    return sums


def summarise_detailed(statistics: RouterStatistics) -> dict[str, Float[Array, ""]]:
    """Return scalar metrics: means over layers, and the largest `z_max`.

    Args:
        statistics: Statistics summed over the batch, stacked over layers.

    Returns:
        Metrics by name; empty for statistics without those of `observe`.
    """
    extra = statistics.extra
    if "detail_top1" not in extra:
        return {}
    tokens = jnp.maximum(statistics.num_tokens, 1.0)
    scalars = {
        "top1_probability": (extra["detail_top1"] / tokens).mean(),
        "mutual_information": mutual_information(statistics).mean(),
        "z_max": z_max(extra["detail_z"]).max(),
    }
    if "detail_margin" in extra:
        scalars["topk_margin"] = (extra["detail_margin"] / tokens).mean()
        scalars["topk_mass"] = (extra["detail_mass"] / tokens).mean()
        scalars["coactivation"] = coactivation(extra["detail_coactivation"]).mean()
    if "detail_domains" in extra:
        scalars["domain_information"] = domain_information(extra["detail_domains"]).mean()
    return scalars


def mean_log_prob(statistics: RouterStatistics | None) -> Float[Array, "L E"] | None:
    """Return the mean log probability of each expert, nats; None without detailed statistics."""
    if statistics is None or "detail_log_prob" not in statistics.extra:
        return None
    tokens = jnp.maximum(statistics.num_tokens, 1.0)
    return statistics.extra["detail_log_prob"] / tokens[..., None]


def mutual_information(statistics: RouterStatistics) -> Float[Array, "*L"]:
    """Return I(token; expert) of the probabilities in nats: H(mean p) - mean H(p)."""
    tokens = jnp.maximum(statistics.num_tokens, 1.0)
    mean = statistics.prob_sum / tokens[..., None]
    return _entropy(mean) - statistics.entropy_sum / tokens


def coactivation(together: Float[Array, "*L E E"]) -> Float[Array, "*L"]:
    """Return the largest share of an expert's tokens that one other expert also has, at most 1.

    Args:
        together: Statistic `detail_coactivation`.
    """
    counts = jnp.diagonal(together, axis1=-2, axis2=-1)
    covariance = together - counts[..., None] * jnp.broadcast_to(
        jnp.eye(together.shape[-1]), together.shape
    )
    return (covariance / jnp.maximum(counts, 1.0)[..., None]).max((-2, -1))


def domain_information(domains: Float[Array, "*L M E"]) -> Float[Array, "*L"]:
    """Return the normalised mutual information of domain and expert, per layer, on the device.

    Args:
        domains: Statistic `detail_domains`.

    Returns:
        Values in [0, 1], as `jaxmoe.data.synthetic.normalized_mutual_information`; 0 where there is
        one domain and one expert.
    """
    joint = domains / jnp.maximum(domains.sum((-2, -1), keepdims=True), 1.0)
    domain = _entropy(joint.sum(-1))
    expert = _entropy(joint.sum(-2))
    entropy = domain + expert
    shared = entropy - _entropy(joint.reshape(*joint.shape[:-2], -1))  # M*E
    return jnp.where(entropy > 0.0, 2.0 * shared / jnp.where(entropy > 0.0, entropy, 1.0), 0.0)


def z_max(counts: Shaped[Array, "*L bins"]) -> Float[Array, "*L"]:
    """Return the upper edge of the highest non-empty bin of `detail_z`; 0 if all are empty."""
    powers = 0.5 * jnp.arange(counts.shape[-1], dtype=jnp.float32) + Z_LOWEST
    edges = jnp.exp2(powers).reshape((1,) * (counts.ndim - 1) + powers.shape)
    return jnp.where(counts > 0, edges, 0.0).max(-1)


def _entropy(shares: Float[Array, "*d n"]) -> Float[Array, "*d"]:
    return -jnp.sum(jax.scipy.special.xlogy(shares, shares), axis=-1)


def _products(rows: Float[Array, "T m"], columns: Float[Array, "T n"]) -> Float[Array, "m n"]:
    """Return the sum over tokens of the outer products; integers, exact below 2^24."""
    return jnp.einsum("tm,tn->mn", rows, columns, preferred_element_type=jnp.float32)


def _count(
    place: Float[Array, " T"], is_real: Shaped[Array, " T"], number: int
) -> Int[Array, " bins"]:
    bins = jnp.arange(number, dtype=jnp.float32)
    return jnp.sum((place[:, None] == bins[None, :]) & is_real[:, None], axis=0, dtype=jnp.int32)
