# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Collectives of the branches of a conditional."""

from jaxmoe.planning.hlo.collectives import Collective, _CollectiveWalk, called_by


def branch_collectives(text: str) -> list[list[Collective]]:
    """Return the collectives of each branch of the one conditional of a lowered program.

    Args:
        text: Text of an HLO module.
    """
    walk = _CollectiveWalk(text)
    found = [
        called_by(instruction)
        for computation in walk.computations.values()
        for instruction in computation.values()
        if instruction.opcode == "conditional"
    ]
    assert len(found) == 1, found
    return [list(walk.walk(branch)) for branch in found[0]]
