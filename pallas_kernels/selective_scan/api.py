# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Linear recurrences over the positions of a row, with numbers that depend on the token.

    state_space_dual   h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T    y_t = h_t c_t    h [N P H]
    selective_scan     h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t      y_t = h_t c_t    h [D H]

The first has one decay per head, and is products of matrices in chunks (Mamba-2, arXiv 2405.21060);
the second one per channel and value of the state (Mamba, arXiv 2312.00752). Where the document
changes the state begins at 0. Padding (document 0) leaves the state as it is; its outputs mean
nothing. JAX derives the gradients, in both implementations.

To add an implementation: `pallas_kernels/selective_scan/<name>.py` with functions of the signature
of the reference, its line in `DUAL` or `SCAN`, a row in
`tests/pallas_kernels/selective_scan/test_selective_scan.py`.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Float32, Int
from pallas_kernels.backend import Implementation, Operation
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.selective_scan import reference, xla
from pallas_kernels.selective_scan.documents import number_documents

DUAL = Operation(
    name="state_space_dual",
    implementations={"reference": reference.state_space_dual, "xla": xla.state_space_dual},
)
SCAN = Operation(
    name="selective_scan",
    implementations={"reference": reference.selective_scan, "xla": xla.selective_scan},
)


def state_space_dual(
    x: Float[Array, "B S N P"],
    dt: Float32[Array, "B S N"],
    decay: Float32[Array, " N"],
    b: Float[Array, "B S G H"],
    c: Float[Array, "B S G H"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    initial: Float32[Array, "B N P H"] | None = None,
    chunk: int = 64,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S N P"], Float32[Array, "B N P H"]]:
    """Return the outputs of a recurrence with one decay per head, and its last state.

    Args:
        x: Inputs of N heads of P channels.
        dt: Steps, at least 0.
        decay: a, the negative rate of each head.
        b: What is written into the states of G groups of heads; head n is in group n // (N / G).
        c: What is read from them.
        segment_ids: Document of each position, 0 for padding; one document a row when None.
        initial: State before the first position, of its document; zeros when None.
        chunk: Positions that are multiplied together.
        implementation: Implementation to run; None picks the fastest that runs here.

    Returns:
        Outputs in the dtype of x, and the state after the last position that is not padding.

    Raises:
        ValueError: Sizes that do not fit, or an implementation that cannot run here.
    """
    heads, groups = x.shape[2], b.shape[2]
    if heads % groups:
        raise ValueError(f"state_space_dual: {heads} heads are no multiple of {groups} groups")
    shape = (x.shape[0], heads, x.shape[3], b.shape[3])
    given = (x, dt, decay, b, c)
    return _run(DUAL, implementation, given, segment_ids, initial, shape, chunk)


def selective_scan(
    x: Float[Array, "B S D"],
    dt: Float32[Array, "B S D"],
    decay: Float32[Array, "D H"],
    b: Float[Array, "B S H"],
    c: Float[Array, "B S H"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    initial: Float32[Array, "B D H"] | None = None,
    chunk: int = 64,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S D"], Float32[Array, "B D H"]]:
    """Return the outputs of a recurrence with a decay per channel and value, and its last state.

    Args:
        x: Inputs of D channels.
        dt: Steps, at least 0.
        decay: a, the negative rates.
        b: What is written into the states.
        c: What is read from them.
        segment_ids: Document of each position, 0 for padding; one document a row when None.
        initial: State before the first position, of its document; zeros when None.
        chunk: Positions that are computed together.
        implementation: Implementation to run; None picks the fastest that runs here.

    Returns:
        Outputs in the dtype of x, and the state after the last position that is not padding.

    Raises:
        ValueError: A chunk below 1, or an implementation that cannot run here.
    """
    shape = (x.shape[0], x.shape[2], b.shape[2])
    given = (x, dt, decay, b, c)
    return _run(SCAN, implementation, given, segment_ids, initial, shape, chunk)


def _run(
    operation: Operation,
    implementation: Implementation | None,
    given: tuple[Array, ...],
    segment_ids: Array | None,
    initial: Array | None,
    shape: tuple[int, ...],
    chunk: int,
) -> Any:
    if chunk < 1:
        raise ValueError(f"{operation.name}: chunk={chunk} must be at least 1")
    x, dt, decay, b, c = given
    documents, dt = number_documents(segment_ids, dt)
    state = jnp.zeros(shape, jnp.float32) if initial is None else initial
    # Both are carried from position to position, with values that vary as the arrays do.
    documents, state = match_varying((documents, state), given, documents, state)
    return operation.function(implementation)(x, dt, decay, b, c, documents, state, chunk)
