# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the matrix products that a program executes, from its HLO text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from jaxmoe.planning.hlo import called_by, trip_count
from jaxmoe.planning.hlo.text import Computation, HloModule, Instruction, parse_module


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A product, once for each call site."""

    flops: int
    """Operations of one execution."""
    sizes: frozenset[int]
    """Sizes of the dimensions of both factors."""
    turns: int
    """Executions in one run of the program; where it is in a branch, the largest number."""
    is_in_branch: bool
    """Whether it is in a branch of a conditional."""

    @property
    def total(self) -> int:
        """Operations in one run of the program."""
        return self.turns * self.flops


def products(text: str) -> list[Product]:
    """Return the products of a program, lowered or compiled.

    Args:
        text: Text of an HLO module.
    """
    module = parse_module(text)
    return list(_walk(module, module.entry, 1, is_in_branch=False))


def _walk(module: HloModule, name: str, turns: int, *, is_in_branch: bool) -> Iterator[Product]:
    computation = module.computations.get(name, {})
    for instruction in computation.values():
        if instruction.opcode == "dot":
            yield _product(instruction, computation, turns, is_in_branch)
        elif instruction.opcode == "while":
            count = trip_count(module, instruction, computation)
            assert count is not None, f"{instruction.name} turns an unknown number of times"
            body = instruction.attribute("body") or ""
            yield from _walk(module, body, turns * count, is_in_branch=is_in_branch)
        else:
            inside = is_in_branch or instruction.opcode == "conditional"
            for called in called_by(instruction):
                yield from _walk(module, called, turns, is_in_branch=inside)


def _product(dot: Instruction, computation: Computation, turns: int, is_in_branch: bool) -> Product:
    left, right = (_sizes(computation[name].shape) for name in dot.operands)
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    contracted = [left[int(dim)] for dim in (found[1].split(",") if found else ()) if dim]
    flops = 2 * math.prod(_sizes(dot.shape)) * math.prod(contracted)
    return Product(flops, frozenset((*left, *right)), turns, is_in_branch)


def _sizes(shape: str) -> list[int]:
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(size) for size in (found[1].split(",") if found else ()) if size]
