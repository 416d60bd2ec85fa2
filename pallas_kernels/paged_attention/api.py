# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes attention of many sequences over one pool of pages of keys and values.

    pool  [L P G M 2 H]    page p of layer l holds G positions; keys and values alternate
    table [rows W]         pages of a row's sequence, in order: position u is at page table[u // G]

The queries are one row of T: R sequences with one query each, then sequences with C queries each
(a piece of a prompt). A query at position p sees the positions u <= p of its own sequence, with a
window those with p - u < window, and with chunks those with u // chunk = p // chunk. Slots that are
not filled yet are therefore the future.

    reference     gathers the pages and masks a softmax, in float32
    xla           gathers the pages, then `flash_attention` with positions
    pallas_tpu    JAX's own ragged_paged_attention, which reads the pages where they are
    pallas_gpu    one Triton kernel that reads the pages where they are, keys split over programs

It has no gradient. Source of the layout: PagedAttention, arXiv 2309.06180, section 4.

To add an implementation: `pallas_kernels/paged_attention/<name>.py` with `paged_attention` (of q,
pool, layer, tables, positions, rules), its line in `OPERATION` of
`pallas_kernels/paged_attention/api.py`, a row in
`tests/pallas_kernels/paged_attention/test_paged_attention.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.backend import Implementation, Operation
from pallas_kernels.deferred import DeferredProduct
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.paged_attention import reference, xla
from pallas_kernels.paged_attention.arguments import (
    PagedRules,
    Pool,
    Tables,
    check_arguments,
    rules_of,
)

_GPU = "pallas_kernels.paged_attention.gpu"
_TPU = "pallas_kernels.paged_attention.tpu"

OPERATION = Operation(
    name="paged_attention",
    implementations={
        "reference": reference.paged_attention,
        "xla": xla.paged_attention,
        "pallas_tpu": DeferredProduct(f"{_TPU}:paged_attention"),
        "pallas_gpu": DeferredProduct(f"{_GPU}:paged_attention"),
    },
    refusals={
        "pallas_tpu": DeferredProduct(f"{_TPU}:reason_against"),
        "pallas_gpu": DeferredProduct(f"{_GPU}:reason_against_default"),
    },
)


def paged_attention(
    q: Float[Array, "T N H"],
    pool: Pool,
    layer: Int[Array, ""],
    singles: Int[Array, "R W"],
    pieces: Int[Array, "p W"],
    positions: Int[Array, " T"],
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    returns_lse: bool = False,
) -> Any:
    """Return causal attention of queries over the pages of one layer.

    Args:
        q: Queries: one of each of R sequences, then C of each of the others.
        pool: Pages of all layers, which hold keys and values of the queries too; M divides N.
        layer: Layer that is read.
        singles: Pages of the sequences with one query.
        pieces: Pages of the sequences with C queries; entries that are not used are any page.
        positions: Positions of the queries; -1 for padding, whose result is 0, or with
            "pallas_tpu" anything.
        window: Distance from which keys are hidden.
        chunk: Positions of a chunk, whose queries see no other; by "reference" or "xla".
        softcap: Bound of the logits: tanh squashes them to (-softcap, softcap).
        scale: Factor of the logits; None is 1 / sqrt(H).
        implementation: Implementation to run; None picks the fastest that runs here.
        returns_lse: Whether the log-sum-exp is returned too, by "reference" or "xla".

    Returns:
        The attention [T N H] in the dtype of q; with `returns_lse` a pair of it and the log-sum-exp
        [T N] in float32, -inf where a query sees nothing.

    Raises:
        ValueError: Shapes or options do not fit, the implementation cannot run here, or a gradient
            is asked for.
    """
    tables = Tables(singles, pieces)
    check_arguments(q, pool, tables, positions)
    if returns_lse or chunk is not None:
        implementation = implementation or "xla"
        if implementation.startswith("pallas"):
            lacking = "returns no log-sum-exp" if returns_lse else f"has no chunks (chunk={chunk})"
            raise ValueError(
                f"paged_attention: implementation={implementation!r} {lacking}: choose 'xla'"
            )
    rules = rules_of(q, window, softcap, scale, implementation, returns_lse, chunk)
    arrays = (q, pool, layer, tables, positions)
    attend = OPERATION.function(implementation, q, pool)
    return _without_gradient(*match_varying(arrays, arrays), rules, attend)


# JAX 0.11 keeps a kernel whose result is not read, and flax's loop over layers, which traces a
# layer once for what does not depend on its input, then refuses it. It drops a call with a gradient
# of its own.
@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _without_gradient(
    q: Array,
    pool: Any,
    layer: Array,
    tables: Tables,
    positions: Array,
    rules: PagedRules,
    attend: Callable[..., Any],
) -> Any:
    return attend(q, pool, layer, tables, positions, rules)


def _forward(*arguments: Any) -> Any:
    raise ValueError(
        "paged_attention has no gradient: it serves requests. Train with flash_attention."
    )


def _backward(*arguments: Any) -> Any:
    raise AssertionError("the forward pass has raised")


_without_gradient.defvjp(_forward, _backward)
