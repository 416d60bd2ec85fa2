# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The seam between routing and experts: `expert_parallel` sends rows to experts and back.

Called inside an island, on the tokens of one device. Each backend is one file with the signature
of `dispatch_locally`.

To add one: a file with its config class (`name`, `expert_axis`) and function, its config into
`DispatcherConfig` in `sharding/expert_parallel/__init__.py`, a line in `expert_parallel`.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from sharding.assignments import Assignments
from sharding.expert_parallel.local import LocalConfig, LocalExperts, dispatch_locally


def expert_parallel(
    x: Float[Array, "T D"],
    assignments: Assignments,
    experts: LocalExperts,
    *,
    num_experts: int,
    config: LocalConfig,
) -> Float[Array, "T D"]:
    """Applies to each token its assigned experts and sums their outputs by gate.

    Args:
        x: the tokens of this device.
        assignments: of these tokens.
        experts: (rows sorted by expert, group sizes) -> outputs of the experts held here.
        num_experts: E.
        config: which backend.

    Returns:
        In the dtype of `x`; a token without assignment gets 0.
    """
    match config:
        case LocalConfig():
            return dispatch_locally(x, assignments, experts, num_experts)
