# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the recurrences of Mamba (arXiv 2312.00752) and of Mamba-2 (arXiv 2405.21060).

    selective_scan      h[d, p]    = exp(dt[d] A[d, p]) h[d, p] + dt[d] x[d] b[p]
                        y[d]       = sum over p of h[d, p] c[p]
    state_space_dual    h[n, h, p] = exp(dt[n] A[n]) h[n, h, p] + dt[n] x[n, h] b[m, p]
                        y[n, h]    = sum over p of h[n, h, p] c[m, p]           m = n // (N / M)

Letters beside the legend: P numbers of the state per channel; in selective_scan D is the number of
channels of the mixer; M groups of heads share b and c as query heads share key heads. There is no
term D x.

Segments. The state is 0 before the first token of a segment. A segment begins where the id differs
from that of the last token before that is not padding (id 0). Padding changes no state: a prompt
that is padded on the right leaves the state that decoding continues from. y is 0 there.

`initial` belongs to the segment of the first token that is not padding, whichever id it has: a
sequence cut within a segment, with the state handed over, gives what one call gives. A caller who
cuts it between two segments hands over zeros (None).

Steps, decays, their sums and states are float32; products add up in float32. selective_scan has no
kernel for TPUs, where None is "xla".

To add an implementation: `pallas_kernels/selective_scan/<name>.py` with the functions of
`reference.py`, its lines in the tables of `pallas_kernels/selective_scan/api.py`, a row in
`tests/pallas_kernels/selective_scan/test_selective_scan.py`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Float32, Int
from pallas_kernels.backend import Implementation, Operation
from pallas_kernels.deferred import DeferredProduct
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.selective_scan import reference, xla
from pallas_kernels.selective_scan.arguments import check_arrays, check_tokens
from pallas_kernels.selective_scan.segments import find_segments

OPERATION = Operation(
    name="selective_scan",
    implementations={
        "reference": reference.selective_scan,
        "xla": xla.selective_scan,
    },
)

STATE_SPACE_DUAL = Operation(
    name="state_space_dual",
    implementations={
        "reference": reference.state_space_dual,
        "xla": xla.state_space_dual,
        "pallas_tpu": DeferredProduct("pallas_kernels.selective_scan.tpu.kernels:state_space_dual"),
    },
)


def selective_scan(
    x: Float[Array, "B S D"],
    dt: Float32[Array, "B S D"],
    decay: Float32[Array, "D P"],
    b: Float[Array, "B S P"],
    c: Float[Array, "B S P"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    initial: Float32[Array, "B D P"] | None = None,
    chunk: int = 64,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S D"], Float32[Array, "B D P"]]:
    """Return the outputs of Mamba's recurrence, and the state after the last token.

    Args:
        x: Inputs of D channels.
        dt: Lengths of the steps, not negative.
        decay: A, negative: the logarithm of the decay per step of length 1.
        b: What a token writes to the state.
        c: What a token reads from the state.
        segment_ids: Segment of each token, 0 for padding; None makes a row one segment.
        initial: State before the first token; None is 0.
        chunk: Tokens that are computed at once; the gradient stores one state per chunk.
        implementation: Implementation to run; None picks the fastest that runs here.

    Returns:
        y in the dtype of x, 0 at padding, and the state after the last token that is not padding.

    Raises:
        ValueError: Shapes or dtypes do not fit, or the implementation cannot run here.
    """
    shapes = {"x": "BSD", "dt": "BSD", "decay": "DP", "b": "BSP", "c": "BSP"}
    arrays = {"x": x, "dt": dt, "decay": decay, "b": b, "c": c}
    sizes = check_arrays("selective_scan", shapes, arrays)
    shape = (sizes["B"], sizes["D"], sizes["P"])
    check_tokens("selective_scan", x, segment_ids, (shape, initial), chunk)
    run = OPERATION.function(implementation)
    return _run(run, (x, dt, decay, b, c), segment_ids, initial, shape, chunk)


def state_space_dual(
    x: Float[Array, "B S N H"],
    dt: Float32[Array, "B S N"],
    decay: Float32[Array, " N"],
    b: Float[Array, "B S M P"],
    c: Float[Array, "B S M P"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    initial: Float32[Array, "B N H P"] | None = None,
    chunk: int = 64,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S N H"], Float32[Array, "B N H P"]]:
    """Return the outputs of Mamba-2's recurrence, and the state after the last token.

    Args:
        x: Inputs of N heads.
        dt: Lengths of the steps, not negative.
        decay: A, negative: the logarithm of the decay per step of length 1.
        b: What a token writes to the state, in M groups; M divides N.
        c: What a token reads from the state, in M groups.
        segment_ids: Segment of each token, 0 for padding; None makes a row one segment.
        initial: State before the first token; None is 0.
        chunk: Tokens that are computed at once; the gradient stores one state per chunk.
        implementation: Implementation to run; None picks the fastest that runs here.

    Returns:
        y in the dtype of x, 0 at padding, and the state after the last token that is not padding.

    Raises:
        ValueError: Shapes or dtypes do not fit, or the implementation cannot run here.
    """
    shapes = {"x": "BSNH", "dt": "BSN", "decay": "N", "b": "BSMP", "c": "BSMP"}
    arrays = {"x": x, "dt": dt, "decay": decay, "b": b, "c": c}
    sizes = check_arrays("state_space_dual", shapes, arrays)
    if sizes["M"] == 0 or sizes["N"] % sizes["M"]:
        raise ValueError(
            f"state_space_dual: the groups of b and c ({sizes['M']}) must divide the heads of x "
            f"({sizes['N']}): give a number of groups that does, 1 or {sizes['N']} for example."
        )
    shape = (sizes["B"], sizes["N"], sizes["H"], sizes["P"])
    check_tokens("state_space_dual", x, segment_ids, (shape, initial), chunk)
    run = STATE_SPACE_DUAL.function(implementation)
    return _run(run, (x, dt, decay, b, c), segment_ids, initial, shape, chunk)


def _run(
    run: Callable[..., Any],
    arrays: tuple[Array, ...],
    segment_ids: Array | None,
    initial: Array | None,
    shape: tuple[int, ...],
    chunk: int,
) -> Any:
    if initial is None:
        initial = jnp.zeros(shape, jnp.float32)
    x, dt, decay, b, c = arrays
    segments = find_segments(x.shape[:2], segment_ids)
    dt = segments.where_token(dt)
    operands = (x, dt, decay, b, c, segments.index, initial)
    operands = match_varying(operands, operands)
    if x.shape[1] == 0:
        return operands[0], operands[-1]
    y, state = run(*operands, chunk=min(chunk, x.shape[1]))
    return segments.where_token(y), state
