# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Applies each group's own SwiGLU (arXiv 2002.05202) to consecutive rows: the whole of an expert.

    a, b   = rows[r] @ gate_up[g, :, 0], rows[r] @ gate_up[g, :, 1]
    out[r] = (silu(a) * b * row_factors[r]) @ down[g]        and 0 past the last group

Factors within the product, rather than of its result, have a gradient that needs no outputs:
d row_factors = sum of silu(a) * b * (d out @ down^T). An implementation keeps a and b for the
backward pass, under the name HIDDEN, and `rows`; a caller that can make its rows again keeps HIDDEN
alone (`jax.checkpoint`).

Rows are sorted by group as in `grouped_matmul`, with the same guarantees: rows past the last group
may hold anything, NaN included, and no backend multiplies many rows by every group's matrix. An
implementation can keep the rows in its own layout from the first product to the last.

Either matrix may be quantised (`pallas_kernels.quantize`): gate_up along -3 and down along -2, the
axes that the products sum over, or by one scale (`jax.vmap`: one per group). Rows stay floating,
and meet the few bits as in `grouped_matmul`; quantised matrices are constants.

Rows may be those of tokens (`indices`): the operation then takes the tokens and returns the sums of
their rows. "pallas_tpu" reads them where they lie, and in the backward pass the gradients of the
sums, where the width is a multiple of 256: no array of sorted inputs, or of the gradients of sorted
outputs, is written. Otherwise rows are gathered first.

A floating matrix may have a low-rank addition (`pallas_kernels/grouped_swiglu/additions.py`) where
`adds_factors` says that the implementation multiplies with one.

To add an implementation: `pallas_kernels/grouped_swiglu/<name>.py` with `grouped_swiglu` (without
`implementation`), its line in `OPERATION` of `pallas_kernels/grouped_swiglu/api.py`, a row in
`tests/pallas_kernels/grouped_swiglu/test_grouped_swiglu.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.backend import Implementation, Operation
from pallas_kernels.deferred import DeferredProduct
from pallas_kernels.grouped_matmul.api import sizes_within
from pallas_kernels.grouped_swiglu import reference, xla
from pallas_kernels.grouped_swiglu.additions import NO_ADDITIONS, Additions
from pallas_kernels.grouped_swiglu.rows import RowIndices
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.quantized_factors import check_factors

OPERATION = Operation(
    name="grouped_swiglu",
    implementations={
        "reference": reference.grouped_swiglu,
        "xla": xla.grouped_swiglu,
        "pallas_tpu": DeferredProduct("pallas_kernels.grouped_swiglu.tpu:grouped_swiglu"),
        "pallas_gpu": DeferredProduct("pallas_kernels.grouped_swiglu.gpu:grouped_swiglu"),
    },
    refusals={
        "pallas_gpu": DeferredProduct(
            "pallas_kernels.grouped_matmul.gpu.kernels:reason_against_default"
        )
    },
)


def grouped_swiglu(
    rows: Float[Array, "R k"],
    gate_up: Float[Array, "G k 2 n"]
    | QuantizedArray
    | tuple[Float[Array, "G k n"], Float[Array, "G k n"]],
    down: Float[Array, "G n k"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    row_factors: Float[Array, " A"] | None = None,
    *,
    indices: RowIndices | None = None,
    additions: Additions = NO_ADDITIONS,
    down_is_turned: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "R k"]:
    """Return each group of consecutive rows through the group's own SwiGLU.

    Args:
        rows: Rows sorted by group; rows past the last group are not read.
        gate_up: Matrices of gate and up projection of each group, in the dtype of `rows`; or
            quantised, along -3 or by one scale; or a pair of arrays, which `reads_halves`
            implementations take as they are, and others join first.
        down: Matrix of the down projection of each group, in the dtype of `rows`; or quantised,
            along -2 or by one scale.
        group_sizes: Number of rows of each group, 0 allowed; groups are cut at R.
        row_factors: Factor of the hidden units of each row, float32, such as the gate of its
            expert; None for 1. Those of rows past the last group are not read.
        indices: Tokens of the rows: `rows` are then tokens [T k], and the result is the sum of each
            token's rows [T k]. R is the number of sources. None: the rows are the array.
        additions: Low-rank additions to floating matrices, for `adds_factors` implementations.
        down_is_turned: Whether `down` lies in memory with k before n, as matrices that are gathered
            along k do. The result is the same; kernels that can read both orders need no copy.
        implementation: Implementation to run; None picks the fastest that runs here.

    Returns:
        Rows in the dtype of `rows`, products accumulated in float32; exactly 0 past the last group,
        whose rows do not contribute to the gradients either.

    Raises:
        ValueError: Shapes or dtypes do not fit, or the implementation cannot run here.
    """
    if indices is not None and (additions != NO_ADDITIONS or not reads_halves(implementation)):
        sorted_rows = grouped_swiglu(
            indices.rows_of(rows),
            gate_up,
            down,
            group_sizes,
            row_factors,
            additions=additions,
            down_is_turned=down_is_turned,
            implementation=implementation,
        )
        return indices.sums_of(sorted_rows)
    joined: Any = gate_up
    if isinstance(gate_up, tuple):
        joined = jax.eval_shape(_join, *gate_up)
        if not reads_halves(implementation):
            gate_up = _join(*gate_up)
    _check(rows, joined, down, group_sizes)
    options: dict[str, Any] = {}
    if additions != NO_ADDITIONS:
        _check_additions(additions, joined, down, implementation)
        options["additions"] = additions
    num_rows = rows.shape[0]
    if indices is not None:
        options["indices"] = indices
        num_rows = indices.sources.shape[0]
    if row_factors is not None and row_factors.shape != (num_rows,):
        raise ValueError(
            f"grouped_swiglu: row_factors has shape {row_factors.shape}: give one for each of the"
            f" {num_rows} rows."
        )
    sizes = sizes_within(num_rows, group_sizes)
    if row_factors is not None:
        has_group = jnp.arange(num_rows) < jnp.sum(sizes)
        row_factors = jnp.where(has_group, row_factors, jnp.zeros_like(row_factors))
    arrays = (rows, gate_up, down, sizes, row_factors)
    if 0 in (num_rows, *rows.shape, *joined.shape):
        return match_varying(jnp.zeros_like(rows), arrays)
    function = OPERATION.function(implementation, rows, gate_up)
    arrays, options = match_varying((arrays, options), (arrays, options))
    return function(*arrays, down_is_turned=down_is_turned, **options)


def reads_halves(implementation: Implementation | None) -> bool:
    """Return whether the implementation that runs reads gate and up from two arrays.

    Args:
        implementation: As for `grouped_swiglu`.
    """
    return OPERATION.choose(implementation).implementation == "pallas_tpu"


def adds_factors(implementation: Implementation | None) -> bool:
    """Return whether the implementation that runs multiplies with low-rank additions.

    Args:
        implementation: As for `grouped_swiglu`.
    """
    return OPERATION.choose(implementation).implementation in ("reference", "xla")


def _check_additions(
    additions: Additions, gate_up: Any, down: Any, implementation: Implementation | None
) -> None:
    if not adds_factors(implementation):
        name = OPERATION.choose(implementation).implementation
        raise ValueError(
            f"grouped_swiglu: implementation {name!r} takes no additions: use xla or reference, or"
            " multiply with the factors by grouped_matmul."
        )
    groups, width, _, hidden = gate_up.shape
    shapes = {"gate_up": (groups, width, 2 * hidden), "down": (groups, hidden, width)}
    for name, matrix in {"gate_up": gate_up, "down": down}.items():
        factors = getattr(additions, name)
        if factors is None:
            continue
        if isinstance(matrix, QuantizedArray):
            raise ValueError(
                f"grouped_swiglu: {name} is quantised and has an addition: multiply with the"
                " factors by grouped_matmul."
            )
        rank = factors.down.shape[-1]
        expected = (*shapes[name][:2], rank), (groups, rank, shapes[name][2])
        if (factors.down.shape, factors.up.shape) != expected:
            raise ValueError(
                f"grouped_swiglu: the addition to {name} has factors {factors.down.shape} and"
                f" {factors.up.shape}, which must be {expected[0]} and {expected[1]}."
            )


def _join(gate: Array, up: Array) -> Array:
    if gate.shape != up.shape:
        raise ValueError(
            f"grouped_swiglu: gate {gate.shape} and up {up.shape} must have the same shape."
        )
    return jnp.stack((gate, up), axis=2)


def _check(rows: Array, gate_up: Any, down: Any, group_sizes: Array) -> None:
    shapes = (
        f"rows {rows.shape}, gate_up {gate_up.shape}, down {down.shape}, "
        f"group_sizes {group_sizes.shape}"
    )
    if (rows.ndim, gate_up.ndim, down.ndim, group_sizes.ndim) != (2, 4, 3, 1):
        raise ValueError(
            "grouped_swiglu takes rows [R k], gate_up [G k 2 n], down [G n k] and group_sizes [G], "
            f"not {shapes}."
        )
    groups, hidden = down.shape[:2]
    if gate_up.shape != (groups, rows.shape[1], 2, hidden) or down.shape[2] != rows.shape[1]:
        raise ValueError(
            "grouped_swiglu: gate_up must be [G k 2 n] and down [G n k], with k the width of rows "
            f"({rows.shape[1]}): {shapes}."
        )
    if group_sizes.shape[0] != groups:
        raise ValueError(
            f"grouped_swiglu: there are matrices for {groups} groups, and {group_sizes.shape[0]} "
            f"group_sizes, in {shapes}: give one size for each group, 0 included."
        )
    check_factors("grouped_swiglu", {"rows": rows, "gate_up": gate_up}, (-1, -3))
    check_factors("grouped_swiglu", {"rows": rows, "down": down}, (-1, -2))
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"grouped_swiglu: group_sizes must be integers, not {group_sizes.dtype}.")
