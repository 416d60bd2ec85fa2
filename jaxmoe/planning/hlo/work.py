# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the FLOPs of a program and the bytes that it moves, from its HLO text, loops included.

XLA's own cost analysis counts the body of a loop once, and so favours the program with more loops.
Here a computation counts as often as it runs. Per device:

    FLOPs    of products (dot, convolution), and apart from them of kernels by their own estimate
    bytes    read and written in device memory by each instruction outside a fusion; what lies in
             on-chip memory (`S(1)` in a layout) is free, a slice counts what it takes, an update
             in place what it writes, a kernel its operands and results once

A collective that is fused with the work beside it counts where it starts: the fusions that continue
it (`continuation_config` of the TPU) count their own operands and results only.

A loop with an unknown trip count counts once, and every branch of a conditional does. Padding of
tiles is not counted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

from jaxmoe.planning.hlo.collectives import called_by, trip_count
from jaxmoe.planning.hlo.text import (
    Computation,
    Instruction,
    elements_of,
    memory_bytes_of,
    operand_shapes,
    parse_module,
    sizes_of,
)

_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id domain"
    " opt-barrier optimization-barrier add-dependency".split()
)
_FREE_CALLS = ("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding")
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME = ("bitcast", "reshape")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramWork:
    """Work of one device in one run of a program."""

    product_flops: float
    """Operations of products that XLA compiles."""
    kernel_flops: float
    """Operations of kernels by their own estimate."""
    bytes_accessed: float
    """Bytes read and written in device memory."""
    unestimated: int
    """Executions of kernels without an estimate, whose operations are not counted."""


def work(text: str) -> ProgramWork:
    """Return the work of a program.

    Args:
        text: Text of a compiled HLO module.

    Raises:
        ValueError: The text has no entry computation.
    """
    walk = ProgramWalk(text)
    products = 0.0
    kernels = 0.0
    moved = 0.0
    unestimated = 0
    for instruction, computation, turns in walk.instructions(walk.module.entry, 1):
        products += turns * walk.product_flops(instruction, computation)
        moved += turns * walk.bytes_moved(instruction, computation)
        if '"tpu_custom_call"' in instruction.attributes:
            estimate = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', instruction.attributes)
            kernels += turns * int(estimate[1]) if estimate else 0
            unestimated += 0 if estimate else turns
    return ProgramWork(
        product_flops=products, kernel_flops=kernels, bytes_accessed=moved, unestimated=unestimated
    )


class ProgramWalk:
    """The walk through a module's computations.

    Args:
        text: Text of a compiled HLO module.

    Raises:
        ValueError: The text has no entry computation.
    """

    def __init__(self, text: str):
        self.module = parse_module(text)
        self.computations = self.module.computations

    def instructions(self, name: str, turns: int) -> Iterator[tuple[Instruction, Computation, int]]:
        """Yield the instructions that a computation runs, without those inside fusions."""
        computation = self.computations.get(name, {})
        for instruction in computation.values():
            if instruction.opcode == "while":
                count = trip_count(self.module, instruction, computation)
                body = instruction.attribute("body") or ""
                yield from self.instructions(body, turns * (1 if count is None else count))
            elif instruction.opcode in ("call", "conditional", "async-start"):
                for called in called_by(instruction):
                    yield from self.instructions(called, turns)
            elif instruction.opcode == "fusion-start":
                result = elements_of(instruction.shape)[1]
                yield (
                    dataclasses.replace(instruction, opcode="fusion", shape=result),
                    computation,
                    turns,
                )
            elif instruction.opcode not in _FREE:
                yield instruction, computation, turns

    def product_flops(self, instruction: Instruction, computation: Computation) -> int:
        """Return the operations of a product, or of the products in a fusion."""
        return sum(
            dot_flops(part, inner) if part.opcode == "dot" else convolution_flops(part, inner)
            for part, inner in self.parts(instruction, computation)
            if part.opcode in ("dot", "convolution")
        )

    def parts(
        self, instruction: Instruction, computation: Computation
    ) -> Iterator[tuple[Instruction, Computation]]:
        """Yield an instruction, or those inside if it is a fusion, with their computations."""
        if instruction.opcode != "fusion":
            yield instruction, computation
            return
        inner = self.computations.get(instruction.attribute("calls") or "", {})
        for inner_instruction in inner.values():
            yield from self.parts(inner_instruction, inner)

    def bytes_moved(self, instruction: Instruction, computation: Computation) -> int:
        """Return the bytes that an instruction outside a fusion reads and writes."""
        opcode = instruction.opcode
        shape = instruction.shape
        operands = operand_shapes(instruction, computation)
        if opcode.endswith(("-done", "-update")) or any(
            f'"{name}"' in instruction.attributes for name in _FREE_CALLS
        ):
            return 0
        if opcode == "fusion":
            return self.bytes_of_fusion(instruction, operands)
        if opcode == "copy-start":
            target, origin = elements_of(shape)[:2]
            return memory_bytes_of(target) + memory_bytes_of(origin)
        if opcode.endswith("-start") and opcode != "all-reduce-start":
            shape = elements_of(shape)[1]
        if opcode in _SLICES:
            return _taken(shape, operands[0]) + memory_bytes_of(shape)
        if opcode == "dynamic-update-slice":
            return memory_bytes_of(operands[1]) + _taken(operands[1], operands[0])
        return sum(map(memory_bytes_of, (*operands, shape)))

    def bytes_of_fusion(self, fusion: Instruction, operands: list[str]) -> int:
        """Return the bytes that a fusion takes of its operands and writes of its results."""
        name = fusion.attribute("calls") or ""
        inner = self.computations[name]
        if _ends_collective(inner):
            return 0
        results = elements_of(fusion.shape)
        read_bytes = _own_rows(fusion, "operand", operands)
        written = _own_rows(fusion, "output_tuple", results)
        read = sum(
            min(memory_bytes_of(operands[index]), self.taken_of_parameter(name, index))
            for index in read_bytes
            if memory_bytes_of(operands[index])
        )
        root = _behind(self.module.roots[name], inner)
        roots = [root]
        if root.opcode == "tuple":
            roots = [_behind(inner[operand], inner) for operand in root.operands]
        if len(roots) != len(results):
            return read + sum(memory_bytes_of(results[index]) for index in written)
        return read + sum(self.written(roots[at], results[at], inner) for at in written)

    def written(self, root: Instruction, result: str, computation: Computation) -> int:
        """Return the bytes that one result of a fusion writes."""
        if root.opcode == "parameter":
            return 0
        if root.opcode == "dynamic-update-slice":
            return _taken(operand_shapes(root, computation)[1], result)
        return memory_bytes_of(result)

    def taken_of_parameter(self, name: str, index: int) -> int:
        """Return the bytes that a fused computation takes of one parameter."""
        computation = self.computations[name]
        origin = next(
            member
            for member in computation.values()
            if member.opcode == "parameter" and member.arguments.strip() == str(index)
        )
        return sum(
            self.taken(user, operand, computation) for user, operand in _users(origin, computation)
        )

    def taken(self, user: Instruction, operand: str, computation: Computation) -> int:
        """Return the bytes that an instruction in a fusion takes of an operand."""
        positions = [at for at, name in enumerate(user.operands) if name == operand]
        if user.opcode == "tuple":
            return 0
        if user.opcode in _SLICES and positions == [0]:
            return _bytes(user.shape)
        if user.opcode == "dynamic-update-slice" and positions == [0]:
            return 0
        if user.opcode == "fusion":
            inner = user.attribute("calls") or ""
            return sum(self.taken_of_parameter(inner, at) for at in positions)
        return _bytes(computation[operand].shape)


def dot_flops(dot: Instruction, computation: Computation) -> int:
    """Return the operations of a dot, two for each product of two numbers.

    Args:
        dot: The instruction.
        computation: Computation that has it.
    """
    sizes = sizes_of(operand_shapes(dot, computation)[0])
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    contracted = [sizes[int(dim)] for dim in (match[1].split(",") if match else ()) if dim]
    return 2 * math.prod(sizes_of(dot.shape)) * math.prod(contracted)


def convolution_flops(convolution: Instruction, computation: Computation) -> int:
    """Return the operations of a convolution; the TPU compiler makes one of each dot.

    Args:
        convolution: The instruction.
        computation: Computation that has it.
    """
    sizes = sizes_of(operand_shapes(convolution, computation)[0])
    result = sizes_of(convolution.shape)
    attributes = convolution.attributes
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if labels is None:
        raise ValueError(f"{convolution.name} has no dim_labels: {attributes[:200]}")
    counts = [
        int(match[1]) if (match := re.search(rf"{name}_group_count=(\d+)", attributes)) else 1
        for name in ("feature", "batch")
    ]
    products = (
        (sizes[labels[1].index("f")] // counts[0])
        * (sizes[labels[1].index("b")] // counts[1])
        * result[labels[3].index("f")]
    )
    window = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    for dim in range(len(sizes) - 2):
        place = str(dim)
        products *= _valid_positions(
            sizes[labels[1].index(place)],
            result[labels[3].index(place)],
            *(_field(fields, name, dim) for name in ("size", "stride", "lhs_dilate", "rhs_dilate")),
            int(fields["pad"].split("x")[dim].split("_")[0]) if "pad" in fields else 0,
        )
    return 2 * products


def _field(fields: dict[str, str], name: str, dim: int) -> int:
    return int(fields[name].split("x")[dim]) if name in fields else 1


@functools.lru_cache(maxsize=1024)
def _valid_positions(
    limit: int, results: int, size: int, stride: int, left_step: int, right_step: int, pad: int
) -> int:
    """Return the pairs of result and kernel element that meet an element, not padding or a hole."""
    total = 0
    starts = np.arange(results) * stride - pad
    for element in range(size):
        places = starts + element * right_step
        inside = (places >= 0) & (places < limit * left_step - left_step + 1)
        total += int((inside & (places % left_step == 0)).sum())
    return total


def _users(origin: Instruction, computation: Computation) -> Iterator[tuple[Instruction, str]]:
    """Yield the instructions that use a value, and its name there; reshapes are seen through."""
    for instruction in computation.values():
        if origin.name in instruction.operands:
            if instruction.opcode in _SAME:
                yield from _users(instruction, computation)
            else:
                yield instruction, origin.name


def _behind(instruction: Instruction, computation: Computation) -> Instruction:
    """Return the instruction that computes a value, behind reshapes."""
    while instruction.opcode in _SAME:
        instruction = computation[instruction.operands[0]]
    return instruction


def _own_rows(fusion: Instruction, name: str, shapes: list[str]) -> range:
    """Return the numbers of operands or results that are no part of a collective in flight."""
    if "continuation_config" not in fusion.attributes:
        return range(len(shapes))
    ends = (
        re.search(rf'"{name}_original_{end}":"?(\d+)', fusion.attributes)
        for end in ("start", "end")
    )
    first, last = (int(end[1]) if end else -1 for end in ends)
    return range(first, last + 1) if first >= 0 else range(0)


def _ends_collective(computation: Computation) -> bool:
    return any(
        '"AsyncCollectiveDone"' in instruction.attributes for instruction in computation.values()
    )


def _taken(shape: str, of: str) -> int:
    """Return the bytes of `shape` taken of an array, which on-chip memory makes free."""
    return min(_bytes(shape), memory_bytes_of(of))


def _bytes(shape: str) -> int:
    return memory_bytes_of(re.sub(r"S\(\d+\)", "", shape))
