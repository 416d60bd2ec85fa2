# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines what an implementation of flash_attention consists of, and the gradient shared by all.

    attend          Operands -> (out, lse)
    differentiate   Operands, OutGradient -> (d_q, d_k, d_v), float32

The backward pass (FlashAttention-2, arXiv 2307.08691, section 3.1) recomputes the scores from the
log-sum-exp, and takes two numbers per query from the forward pass:

    P = exp(S - lse)       dV = P^T dO        dP = dO V^T        delta = sum(dO * O) - d lse
    dS = P * (dP - delta)  dQ = scale dS K    dK = scale dS^T Q

`lse` and `delta` may be those of a softmax over more keys than these: the result is then the part
of the gradient that belongs to these keys, and parts add up. Ring attention relies on it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Float32
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.flash_attention.residuals import name_results


class AttentionOperands(NamedTuple):
    """Queries, keys and values of one call, and which queries see which keys."""

    q: Float[Array, "B S N H"]
    k: Float[Array, "B U M H"]
    v: Float[Array, "B U M Hv"]
    tokens: Tokens
    rules: Rules


class OutGradient(NamedTuple):
    """Gradient of the output, and two numbers per query from the forward pass."""

    d_out: Float[Array, "B S N Hv"]
    lse: Float32[Array, "B N S"]
    """Log-sum-exp of the whole softmax; -inf where a query sees no key, which then adds 0."""
    delta: Float32[Array, "B N S"]
    """Softmax term of the gradient."""


class Kernels(NamedTuple):
    """The two passes of one implementation; hashable."""

    attend: Callable[[AttentionOperands], tuple[Array, Array]]
    """Forward pass: to out in the dtype of q, and lse [B N S] f32."""
    differentiate: Callable[[AttentionOperands, OutGradient], tuple[Array, Array, Array]]
    """Backward pass: to d_q, d_k and d_v in float32."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def flash_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B U M H"],
    v: Float[Array, "B U M Hv"],
    tokens: Tokens,
    rules: Rules,
    kernels: Kernels,
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Return attention by one implementation, with its own gradient."""
    return kernels.attend(AttentionOperands(q, k, v, tokens, rules))


def softmax_delta(
    out: Float[Array, "B S N Hv"], d_out: Float[Array, "B S N Hv"]
) -> Float[Array, "B N S"]:
    """Return the sum of dO * O of every query in float32, a term of the gradient."""
    return jnp.einsum("bsnh,bsnh->bns", d_out.astype(jnp.float32), out.astype(jnp.float32))


def _forward(q, k, v, tokens, rules, kernels):
    out, lse = name_results(*kernels.attend(AttentionOperands(q, k, v, tokens, rules)))
    return (out, lse), (q, k, v, tokens, out, lse)


def _backward(rules, kernels, residuals, gradients):
    q, k, v, tokens, out, lse = residuals
    d_out, d_lse = gradients
    # lse is a constant where a query sees no key.
    delta = softmax_delta(out, d_out) - jnp.where(jnp.isfinite(lse), d_lse, 0.0)
    operands = AttentionOperands(q, k, v, tokens, rules)
    gradient = OutGradient(d_out, lse, delta)
    gradients = kernels.differentiate(operands, gradient)
    return *(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v), strict=True)), None


flash_attention.defvjp(_forward, _backward)
