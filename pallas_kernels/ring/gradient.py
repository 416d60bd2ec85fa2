# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Joins the two passes of a ring to one differentiable function.

Only q, k, v, out and lse are kept from the forward pass, the last two under the name of
flash_attention's results.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention.residuals import name_results


class RingInputs(NamedTuple):
    """Arrays of one rank; a pytree."""

    q: Float[Array, "B S N H"]
    k: Float[Array, "B S M H"]
    v: Float[Array, "B S M Hv"]
    tokens: Any
    """Pytree of positions and segments, as the kind of ring has them."""


class RingPasses(NamedTuple):
    """The two passes of one kind of ring; hashable."""

    attend: Callable[..., tuple[Array, Array]]
    """Forward pass: (given, ring) to out in the dtype of q and lse [B N S] f32."""
    differentiate: Callable[..., tuple[Array, Array, Array]]
    """Backward pass: (given, out, lse, d_out, ring, d_lse) to d_q, d_k and d_v in float32; without
    d_lse it is 0."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attend(inputs: RingInputs, ring: Any, passes: RingPasses) -> Float[Array, "B S N Hv"]:
    """Return attention of this rank's queries to the keys of all ranks.

    Args:
        inputs: Arrays of this rank.
        ring: Static part of the call.
        passes: Both passes.
    """
    return passes.attend(inputs, ring)[0]


def _forward(inputs, ring, passes):
    out, lse = name_results(*passes.attend(inputs, ring))
    return out, (inputs, out, lse)


def _backward(ring, passes, residuals, d_out):
    inputs, *_ = residuals
    gradients = passes.differentiate(*residuals, d_out, ring)
    d_q, d_k, d_v = (d.astype(x.dtype) for d, x in zip(gradients, inputs[:3], strict=True))
    return (RingInputs(d_q, d_k, d_v, None),)


attend.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attend_with_lse(
    inputs: RingInputs, ring: Any, passes: RingPasses
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Return what `attend` returns and the log-sum-exp, which has a gradient of its own.

    Args:
        inputs: Arrays of this rank.
        ring: Static part of the call.
        passes: Both passes.
    """
    return passes.attend(inputs, ring)


def _forward_with_lse(inputs, ring, passes):
    out, lse = name_results(*passes.attend(inputs, ring))
    return (out, lse), (inputs, out, lse)


def _backward_with_lse(ring, passes, residuals, gradients):
    inputs, _, lse = residuals
    d_out, d_lse = gradients
    # lse is a constant where a query sees no key.
    d_lse = jnp.where(jnp.isfinite(lse), d_lse, 0.0)
    gradients = passes.differentiate(*residuals, d_out, ring, d_lse)
    d_q, d_k, d_v = (d.astype(x.dtype) for d, x in zip(gradients, inputs[:3], strict=True))
    return (RingInputs(d_q, d_k, d_v, None),)


attend_with_lse.defvjp(_forward_with_lse, _backward_with_lse)
