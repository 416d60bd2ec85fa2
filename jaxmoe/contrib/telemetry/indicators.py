# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes indicators of instability per layer during training.

    attention_z             mean over tokens and heads of LSE^2, LSE of the scaled, masked logits
    attention_max_logit     largest of these logits
    router_z                mean over tokens of (logsumexp of all router logits)^2
    router_max_logit        largest router logit
    attention_rms           sqrt(mean h^2) of the branch's output h
    attention_rms_scaled    the same of m h, as it is added to the residual stream
    attention_outliers      share of the entries of h with |h - mean| > 5 std, mean and unbiased std
                            per token over features; no multiplier changes it
    feed_forward_*          the same three of the feed-forward or MoE branch
    expert_correlation      mean over tokens of the mean cosine of two of their experts' outputs
    activation_correlation  correlation of router logit and norm of the expert's gate neurons over
                            the tokens of the first row, mean over experts

With u_i = E_i(x) / |E_i(x)| and the K experts of a token, any dispatcher gives the correlation:

    rho = (|sum_i u_i|^2 - K) / (K (K - 1))          K > 1, after drops

from a second run of the experts with gates of 1 and outputs of length 1. With uniform gates and
equal sizes SqrtGate's argument neglects it: RMS of the mixture = r sqrt(1 + rho (K - 1)). It is not
defined where K is 1, nor where experts read mixtures of tokens.

Each is a sum over real tokens and their number, or a maximum: additive over devices and
micro-batches. Layers return them (not sown, so recomputation counts nothing twice), without a
gradient, and only with `ExecutionConfig(telemetry="detailed")`. The cost is a second pass of the
experts and of q k^T.

Source: HyperP (arXiv 2603.28743, section 4 and its code), which takes h after the multiplier. The
indicators of a step (update over weight, the head's) are in
`jaxmoe/contrib/telemetry/step.py`.

To add an indicator: a value per token, through `token_means`, in
jaxmoe/contrib/telemetry/indicators.py, called by the method of
jaxmoe/contrib/telemetry/observer.py that has the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.layers.observer import Observations
from jaxmoe.routing import RouterStatistics
from sharding.constrain import place_like

OUTLIER_STDS = 5.0
"""Standard deviations from the mean beyond which an entry counts as an outlier."""


def token_means(
    values: Mapping[str, Float[Array, "B S"]],
    token_mask: Bool[Array, "B S"],
    peaks: Mapping[str, Float[Array, "B S"]] | None = None,
) -> Observations:
    """Return indicators of values that every token has.

    Args:
        values: Values to average, by name.
        token_mask: False leaves a token out.
        peaks: Values of which the largest is reported, by name.
    """
    values, peaks = jax.lax.stop_gradient((dict(values), dict(peaks or {})))
    number = jnp.sum(token_mask, dtype=jnp.float32)

    def mask(value: Array, instead: float) -> Array:
        # Within a sublayer positions may be cut into fewer parts than in the stream.
        return jnp.where(place_like(token_mask, value), value, instead)

    return Observations(
        sums={name: jnp.sum(mask(v, 0.0)) for name, v in values.items()},
        counts=dict.fromkeys(values, number),
        peaks={name: jnp.max(mask(v, -jnp.inf)) for name, v in peaks.items()},
    )


def observe_branch(
    name: str, output: Float[Array, "B S D"], token_mask: Bool[Array, "B S"]
) -> Observations:
    """Return the size and outliers of the output that a branch adds to the residual stream.

    Args:
        name: Name of the branch.
        output: Output before the residual multiplier.
        token_mask: False for padding.
    """
    h = jax.lax.stop_gradient(output).astype(jnp.float32)
    mean = jnp.mean(h, axis=-1, keepdims=True)
    distance = (h - mean) ** 2
    variance = jnp.sum(distance, axis=-1, keepdims=True) / max(h.shape[-1] - 1, 1)
    is_far = distance > OUTLIER_STDS**2 * variance
    squares = jnp.mean(h**2, axis=-1)
    outliers = jnp.mean(is_far, axis=-1, dtype=jnp.float32)
    return token_means({f"{name}_rms": squares, f"{name}_outliers": outliers}, token_mask)


def observe_attention(
    logits: Mapping[str, Float[Array, "B N S"]], token_mask: Bool[Array, "B S"]
) -> Observations:
    """Return the size of the attention logits.

    Args:
        logits: Log-sum-exp `lse` and largest logit `top` of every query.
        token_mask: False for padding.
    """
    return token_means(
        {"attention_z": jnp.mean(logits["lse"] ** 2, axis=1)},
        token_mask,
        peaks={"attention_max_logit": jnp.max(logits["top"], axis=1)},
    )


def observe_routing(
    statistics: RouterStatistics,
    observed: Mapping[str, Float[Array, "B S"]],
    token_mask: Bool[Array, "B S"],
) -> Observations:
    """Return the size of the router logits and the correlation of the experts.

    Args:
        statistics: Routing statistics of the global batch.
        observed: Values of every token, from `observe_experts`.
        token_mask: False for padding.
    """
    top = {"router_max_logit": observed["router_max_logit"]}
    means = token_means({}, token_mask, peaks=top)
    z_sum, number = jax.lax.stop_gradient((statistics.z_sum, statistics.num_tokens))
    means.sums["router_z"], means.counts["router_z"] = z_sum, number
    if "cosine" in observed:
        pairs = {name: observed[name] for name in ("cosine", "has_pair")}
        sums = token_means(pairs, token_mask).sums
        means.sums["expert_correlation"] = sums["cosine"]
        means.counts["expert_correlation"] = sums["has_pair"]
    return means


def unit_rows(rows: Float[Array, "R D"]) -> Float[Array, "R D"]:
    """Scale rows to length 1, f32; a row of zeros is unchanged."""
    rows = rows.astype(jnp.float32)
    squares = jnp.sum(rows**2, axis=-1, keepdims=True)
    return rows * jax.lax.rsqrt(jnp.where(squares > 0.0, squares, 1.0))


def mean_cosine(
    unit_sum: Float[Array, "T D"], num_rows: Float[Array, " T"]
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Return the mean cosine of the pairs among rows of length 1, from their sum.

    Args:
        unit_sum: Sum of the rows of each token.
        num_rows: Number of rows of each token.

    Returns:
        The mean, 0 where there is no pair; and 1 where there is a pair.
    """
    pairs = num_rows * (num_rows - 1.0)
    has_pair = pairs > 0.0
    squares = jnp.sum(unit_sum**2, axis=-1)
    mean = (squares - num_rows) / jnp.where(has_pair, pairs, 1.0)
    return jnp.where(has_pair, mean, 0.0), has_pair.astype(jnp.float32)


def summarise_indicators(
    indicators: Observations, *, residual_multiplier: float
) -> dict[str, Float[Array, "*L"]]:
    """Return the indicators by name; NaN for a layer that does not have one.

    Args:
        indicators: Observations of the whole batch.
        residual_multiplier: Residual multiplier of the model.
    """
    result = {}
    for name, total in indicators.sums.items():
        count = indicators.counts[name]
        mean = jnp.where(count > 0.0, total / jnp.where(count > 0.0, count, 1.0), jnp.nan)
        result[name] = jnp.sqrt(mean) if name.endswith("_rms") else mean
        if name.endswith("_rms"):
            result[f"{name}_scaled"] = jnp.float32(residual_multiplier) * result[name]
    for name, peak in indicators.peaks.items():
        result[name] = jnp.where(jnp.isneginf(peak), jnp.nan, peak)
    return result
