# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs cuDNN's fused attention, which takes whole sequences only.

The two custom calls are those of `jax.nn.dot_product_attention(implementation="cudnn")`, which
rounds the log-sum-exp to the dtype of q; here it stays float32. cuDNN's backward pass takes out
instead of delta, and knows no gradient of lse: where there is one, and for part of the keys, the
backward pass is that of pallas_gpu. It adds up parts of d_q in an order that may vary from call to
call, so that gradients of equal inputs may differ in their last bits.

A fixed mask is all that cuDNN knows: causal or full, with a window to the left. `reason_against`
says what it does not take. By default it runs only where it was measured ahead of pallas_gpu
(`reason_against_default`).
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention.gpu import kernels as pallas_gpu
from pallas_kernels.flash_attention.kernels import (
    AttentionOperands,
    Kernels,
    OutGradient,
    softmax_delta,
)
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.flash_attention.residuals import name_results
from pallas_kernels.gpu.capability import capability_or_none
from pallas_kernels.gpu.choice import reason_against_gpu
from pallas_kernels.jax_versions import match_varying

WIDEST = 128
"""Largest head width in both passes on every GPU; compute capability 9.0 takes `WIDEST_HOPPER`."""
WIDEST_HOPPER = 256

# What was measured ahead of pallas_gpu: `pallas_kernels.measured` has the rates.
_MEASURED_WIDTHS = (64, 128, 256)
_MEASURED_MULTIPLE = 128

_ELEMENTS = {"bfloat16": "BF16", "float16": "F16"}

# Contracted, then batch dimensions of the products, left and right; B T N H arrays, B N T S scores.
_PRODUCTS = {
    "bmm1_dot_dimension_numbers": ((3, 3), (0, 2), (0, 2)),
    "bmm2_dot_dimension_numbers": ((3, 1), (0, 1), (0, 2)),
}
_PRODUCTS_BACKWARD = {
    "bmm1_grad_gemm1_dot_dimension_numbers": ((2, 1), (0, 1), (0, 2)),
    "bmm1_grad_gemm2_dot_dimension_numbers": ((3, 1), (0, 1), (0, 2)),
    "bmm2_grad_gemm1_dot_dimension_numbers": ((2, 1), (0, 1), (0, 2)),
    "bmm2_grad_gemm2_dot_dimension_numbers": ((3, 3), (0, 2), (0, 2)),
}


class _CudnnResult(NamedTuple):
    """A result [B N S H] of cuDNN in the memory order of [B S N H], or another in its own."""

    shape: tuple[int, ...]
    dtype: Any


def reason_against(
    capability: tuple[int, int] | None,
    q: Any,
    k: Any,
    v: Any,
    tokens: Tokens,
    rules: Rules,
) -> str | None:
    """Return why cuDNN does not compute this attention; None if it does.

    Args:
        capability: Compute capability, (9, 0) for Hopper; None if the GPU is not an NVIDIA GPU.
        q: Queries [B S N H].
        k: Keys [B U M H].
        v: Values [B U M Hv].
        tokens: Positions and segments.
        rules: Mask and factor.
    """
    if (against := reason_against_gpu(capability)) is not None:
        return against
    (s, h), u, hv = (q.shape[1], q.shape[3]), k.shape[1], v.shape[3]
    widest = WIDEST_HOPPER if capability == (9, 0) else WIDEST
    refusals = {
        f"cuDNN takes bfloat16 and float16, not {jnp.dtype(q.dtype).name}": (
            jnp.dtype(q.dtype).name not in _ELEMENTS
        ),
        "cuDNN knows no segments": tokens.q_segment_ids is not None,
        "cuDNN counts positions from 0, and positions were given": (
            tokens.q_positions is not None or tokens.kv_positions is not None
        ),
        "cuDNN has no softcap": rules.softcap is not None,
        "cuDNN has windows under a causal mask only": rules.window is not None and not rules.causal,
        f"cuDNN's causal mask is used for as many queries as keys, not {s} and {u}": (
            rules.causal and s != u
        ),
        f"cuDNN's heads of values have the width of those of keys, and {hv} is not {h}": h != hv,
        f"cuDNN takes heads of a multiple of 8, at most {widest} here, not {h}": (
            h % 8 != 0 or h > widest
        ),
    }
    return next((reason for reason, holds in refusals.items() if holds), None)


def reason_against_default(*arguments: Any) -> str | None:
    """Return why cuDNN is not the default; None if it is.

    Args:
        *arguments: q, k, v, tokens and rules. Without all of them it is not: it takes less than
            pallas_gpu does.
    """
    capability = capability_or_none()
    if capability != (9, 0):
        return "it was measured faster than pallas_gpu on compute capability 9.0 only"
    if len(arguments) != len(AttentionOperands._fields):
        return "it takes causal attention over whole sequences only, without segments"
    q, k, v, tokens, rules = arguments
    against = reason_against(capability, q, k, v, tokens, rules)
    if against is not None:
        return against
    is_measured = (
        rules.causal
        and jnp.dtype(q.dtype) == jnp.bfloat16
        and q.shape[3] in _MEASURED_WIDTHS
        and q.shape[1] % _MEASURED_MULTIPLE == 0
    )
    widths = ", ".join(map(str, _MEASURED_WIDTHS))
    return (
        None
        if is_measured
        else (
            "it was measured faster for causal bfloat16 attention alone, with heads of"
            f" {widths} and lengths of a multiple of {_MEASURED_MULTIPLE}"
        )
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def flash_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B U M H"],
    v: Float[Array, "B U M Hv"],
    tokens: Tokens,
    rules: Rules,
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Return what `pallas_kernels.flash_attention` returns.

    Raises:
        ValueError: cuDNN does not compute this.
    """
    return attend(AttentionOperands(q, k, v, tokens, rules))


def attend(operands: AttentionOperands) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Return out and lse.

    Args:
        operands: Queries, keys, values and mask.

    Raises:
        ValueError: cuDNN does not compute this.
    """
    q, k, v, tokens, rules = operands
    against = reason_against(capability_or_none(), q, k, v, tokens, rules)
    if against is not None:
        raise ValueError(
            f"flash_attention: implementation='cudnn': {against}. "
            "Choose 'pallas_gpu', or None for the best that takes these arguments."
        )
    b, s, n, h = q.shape
    out, lse = _call(
        "__cudnn$fmhaSoftmax",
        _PRODUCTS,
        operands,
        (q, k, v),
        (_CudnnResult((b, n, s, h), q.dtype), _CudnnResult((b, n, s), jnp.float32)),
    )
    return jnp.swapaxes(out, 1, 2), lse


def _forward(q, k, v, tokens, rules):
    q, k, v, tokens = jax.tree.map(lambda x: x.value, (q, k, v, tokens))
    out, lse = name_results(*attend(AttentionOperands(q, k, v, tokens, rules)))
    return (out, lse), (q, k, v, tokens, out, lse)


def _backward(rules, residuals, gradients):
    q, k, v, tokens, out, lse = residuals
    operands = AttentionOperands(q, k, v, tokens, rules)
    d_out, d_lse = gradients
    if isinstance(d_out, jax.custom_derivatives.SymbolicZero):
        d_out = match_varying(jnp.zeros(out.shape, out.dtype), out)
    if isinstance(d_lse, jax.custom_derivatives.SymbolicZero):
        d_q, d_k, d_v = _differentiate(operands, out, lse, d_out)
    else:
        delta = softmax_delta(out, d_out) - d_lse
        d_q, d_k, d_v = pallas_gpu.differentiate(operands, OutGradient(d_out, lse, delta))
    return *(d.astype(x.dtype) for d, x in zip((d_q, d_k, d_v), (q, k, v), strict=True)), None


flash_attention.defvjp(_forward, _backward, symbolic_zeros=True)


def _differentiate(
    operands: AttentionOperands,
    out: Float[Array, "B S N Hv"],
    lse: Float[Array, "B N S"],
    d_out: Float[Array, "B S N Hv"],
) -> tuple[Array, ...]:
    """Return d_q, d_k and d_v where lse has no gradient."""
    q, k, v, *_ = operands
    residuals = q, k, v, lse, d_out, out
    results = [
        _CudnnResult((b, heads, s, h), x.dtype) for x in (q, k, v) for b, s, heads, h in (x.shape,)
    ]
    gradients = _call(
        "__cudnn$fmhaSoftmaxBackward", _PRODUCTS_BACKWARD, operands, residuals, results
    )
    return tuple(jnp.swapaxes(x, 1, 2) for x in gradients)


def _call(
    target: str,
    products: dict[str, Any],
    operands: AttentionOperands,
    arrays: Sequence[Array],
    results: Sequence[_CudnnResult],
) -> list[Array]:
    """Return the results of a custom call of XLA, without its workspace."""
    # XLA gives the workspace its size when it has cuDNN's plan.
    results = [*results, _CudnnResult((0,), jnp.uint8)]
    layouts = [(0, 2, 1, 3) if len(x.shape) == 4 else tuple(range(len(x.shape))) for x in results]
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(*x) for x in results],
        output_layouts=layouts,
        vmap_method="sequential",
        custom_call_api_version=2,
        legacy_backend_config=_configuration(operands, products),
    )
    return match_varying(call(*match_varying(tuple(arrays), *arrays))[:-1], *arrays)


def _configuration(operands: AttentionOperands, products: dict[str, Any]) -> str:
    """Return XLA's description of the attention."""
    q, k, _, _, rules = operands
    (b, s, n, _), u = q.shape, k.shape[1]
    hides = rules.window is not None and rules.window < u
    numbers = {
        name: {
            "lhs_contracting_dimensions": [str(contracted[0])],
            "rhs_contracting_dimensions": [str(contracted[1])],
            "lhs_batch_dimensions": [str(at) for at in lhs],
            "rhs_batch_dimensions": [str(at) for at in rhs],
        }
        for name, (contracted, lhs, rhs) in products.items()
    }
    scores = {
        "element_type": _ELEMENTS[jnp.dtype(q.dtype).name],
        "dimensions": [str(size) for size in (b, n, s, u)],
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": float(rules.scale),
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if rules.causal else "NO_MASK",
        **numbers,
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": rules.window if hides else 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention})


KERNELS = Kernels(attend, pallas_gpu.differentiate)
"""Passes for part of the keys."""
