# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes exact attention without storing the matrix of scores; returns (out, lse).

    out = softmax(scale * q k^T over the keys that a query sees) v,   lse = log of the sum beneath

mask.py defines which keys a query sees. The log-sum-exp of every query is returned with gradients
through it, so that attention over parts of the keys can be merged (ring/online_softmax.py).
Grouped-query attention: query head n reads key head n // (N / M). Fast implementations follow
FlashAttention-2 (arXiv 2307.08691): memory linear in S, scores recomputed in the backward pass.

It has no dropout, no bias matrix and no forward-mode differentiation (except in `reference`). It
knows no mesh; ring_attention runs it over one.

To add an implementation: `pallas_kernels/flash_attention/<name>.py` with the two functions of
`pallas_kernels/flash_attention/kernels.py`, its line in `KERNELS` of
`pallas_kernels/flash_attention/api.py` (the files of kernels are imported when they run), a row in
`tests/pallas_kernels/flash_attention/test_flash_attention.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Float32, Int
from pallas_kernels.backend import Implementation, Operation
from pallas_kernels.deferred import DeferredProduct
from pallas_kernels.flash_attention import kernels, reference, xla
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.jax_versions import match_varying

_PACKAGE = "pallas_kernels.flash_attention"


def _defer(module: str) -> kernels.Kernels:
    start = f"{_PACKAGE}.{module}:KERNELS"
    return kernels.Kernels(
        DeferredProduct(f"{start}.attend"), DeferredProduct(f"{start}.differentiate")
    )


KERNELS: dict[Implementation, kernels.Kernels] = {
    "reference": reference.KERNELS,
    "xla": xla.KERNELS,
    "pallas_tpu": _defer("tpu.kernels"),
    "cudnn": _defer("cudnn"),
    "pallas_gpu": _defer("gpu.kernels"),
}
"""Both passes of every implementation, for attention over part of the keys."""

# JAX derives the gradients of the reference; cuDNN's backward pass takes other arguments.
_OTHERS: dict[Implementation, Callable[..., Any]] = {
    "reference": reference.flash_attention,
    "cudnn": DeferredProduct(f"{_PACKAGE}.cudnn:flash_attention"),
}

OPERATION = Operation(
    name="flash_attention",
    implementations={
        name: _OTHERS.get(name, functools.partial(kernels.flash_attention, kernels=operation))
        for name, operation in KERNELS.items()
    },
    refusals={
        "cudnn": DeferredProduct(f"{_PACKAGE}.cudnn:reason_against_default"),
        "pallas_gpu": DeferredProduct(f"{_PACKAGE}.gpu.kernels:reason_against_default"),
    },
)


def flash_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B U M H"],
    v: Float[Array, "B U M Hv"],
    *,
    causal: bool = True,
    q_positions: Int[Array, " S"] | Int[Array, "B S"] | None = None,
    kv_positions: Int[Array, " U"] | Int[Array, "B U"] | None = None,
    q_segment_ids: Int[Array, "B S"] | None = None,
    kv_segment_ids: Int[Array, "B U"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S N Hv"], Float32[Array, "B N S"]]:
    """Return exact attention of queries over keys and values, with the log-sum-exp of every query.

    Args:
        q: Queries, N heads.
        k: Keys, M heads; M divides N.
        v: Values, M heads.
        causal: Whether a query sees no key of a later position.
        q_positions: Positions of the queries; None counts from 0.
        kv_positions: Positions of the keys; None counts from 0. Decoding with a cache gives
            q_positions; slots that are not filled yet then count as the future.
        q_segment_ids: Segments of the queries; a query sees keys of its own segment only.
        kv_segment_ids: Segments of the keys, given together with q_segment_ids.
        window: Distance from which keys are hidden: a query sees keys less than `window` positions
            away.
        softcap: Bound of the logits: tanh squashes them to (-softcap, softcap).
        scale: Factor of the logits; None is 1 / sqrt(H).
        implementation: Implementation to run; None picks the fastest that runs here.

    Returns:
        out in the dtype of q, and lse in float32. A query that sees no key has out 0, lse -inf and
        gradients 0.

    Raises:
        ValueError: Shapes or options do not fit, or the implementation cannot run here.
    """
    check_heads("flash_attention", q, k, v)
    _check_tokens("flash_attention", "q_", q, q_positions, q_segment_ids)
    _check_tokens("flash_attention", "kv_", k, kv_positions, kv_segment_ids)
    rules = Rules.of("flash_attention", q, causal, window, softcap, scale)
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError(
            "flash_attention: q_segment_ids and kv_segment_ids come together, and only one of "
            "them was given: give both, the same array twice for self-attention."
        )

    tokens = Tokens(q_positions, kv_positions, q_segment_ids, kv_segment_ids)
    arrays = (q, k, v, tokens)
    q, k, v, tokens = match_varying(arrays, arrays)
    arguments = (q, k, v, tokens, rules)
    return OPERATION.function(implementation, *arguments)(*arguments)


def check_heads(name: str, q: Array, k: Array, v: Array) -> None:
    """Raise unless q [B S N H], k [B U M H] and v [B U M Hv] fit together.

    Args:
        name: Operation, for the message.
        q: Queries.
        k: Keys.
        v: Values.

    Raises:
        ValueError: Shapes or dtypes do not fit, or M does not divide N.
    """
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if (q.ndim, k.ndim, v.ndim) != (4, 4, 4):
        raise ValueError(f"{name} takes q [B S N H], k [B U M H] and v [B U M Hv], not {shapes}.")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"{name}: q, k and v must have the same batch, not {shapes}.")
    if q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{name}: heads of q ({q.shape[3]} wide) and of k ({k.shape[3]}) must have "
            f"the same width, in {shapes}."
        )
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"{name}: k and v must have the same length and heads, not {shapes}.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{name}: the {q.shape[2]} heads of q must be a multiple of the "
            f"{k.shape[2]} heads of k, in {shapes}."
        )
    if not (q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)):
        raise ValueError(
            f"{name}: q, k and v must have the same floating dtype, not "
            f"{q.dtype}, {k.dtype} and {v.dtype}: cast with .astype."
        )


def _check_tokens(
    name: str, side: str, heads: Array, positions: Array | None, segment_ids: Array | None
) -> None:
    """Raise unless positions are [S] or [B S] and segment ids [B S].

    Args:
        name: Operation, for the message.
        side: Prefix of the argument names: "q_", "kv_" or "".
        heads: Array [B S ...] of the tokens.
        positions: Positions of the tokens.
        segment_ids: Segments of the tokens.

    Raises:
        ValueError: They have other shapes.
    """
    b, length = heads.shape[:2]
    if positions is not None and positions.shape not in ((length,), (b, length)):
        raise ValueError(
            f"{name}: {side}positions {positions.shape} must be ({length},), the same "
            f"for every sequence, or ({b}, {length})."
        )
    if segment_ids is not None and segment_ids.shape != (b, length):
        raise ValueError(f"{name}: {side}segment_ids {segment_ids.shape} must be ({b}, {length}).")
