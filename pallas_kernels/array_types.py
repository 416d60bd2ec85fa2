# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Array types of the whole library, and the legend of their dimension letters.

A public array argument, result or record field is annotated with one of these types and the
letters below, `Float[Array, "T D"]`. Tests check the types at run time; nothing is checked in use.

Model and training (capitals):

    B  sequences in the batch             E  routed experts
    S  positions in a sequence (queries)  e  routed experts held by this device
    U  positions of keys and values       K  experts per token (top_k)
    T  tokens, B*S                        A  assignments, T*K (token, expert) pairs
    V  vocabulary                         R  rows received by the local experts, sorted by expert
    L  layers                             C  capacity, rows of one expert
    D  model width (embed_dim)            F  hidden width of one expert (expert_dim)
    N  query heads                        H  width of one head (Hv where values differ)
    M  key and value heads                G  groups of rows in a grouped product (experts to it)

Kernels (lower case): m, k, n for the matrix product [m k] @ [k n], g for a group.

Letters name dimensions of arrays, never mesh axes. A single letter is written with a leading space,
`Int[Array, " E"]`, so that linters do not take it for a name.

To add a letter: the legend in `pallas_kernels/array_types.py`, if no other package uses the letter.
"""

from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int, Key, PRNGKeyArray, PyTree, Shaped

__all__ = [
    "Array",
    "ArrayLike",
    "Bool",
    "Float",
    "Float32",
    "Int",
    "Key",
    "PRNGKeyArray",
    "PyTree",
    "Shaped",
]
