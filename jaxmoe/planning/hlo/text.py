# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parses HLO text into computations of instructions."""

from __future__ import annotations

import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands, which old texts type (`f32[8] %x`) and lowered ones print bare."""
        if "%" in self.arguments:
            return re.findall(r"%([\w.\-]+(?:#\d+)?)", self.arguments)
        return [name.strip() for name in self.arguments.split(",") if name.strip()]

    def attribute(self, name: str) -> str | None:
        """Return the name that an attribute holds, or None."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None


Computation = dict[str, Instruction]

_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)?(?: -> .*)? \{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_SAME_VALUE = ("bitcast", "convert", "copy")


@dataclasses.dataclass(frozen=True, slots=True)
class HloModule:
    """A parsed module."""

    computations: dict[str, Computation]
    roots: dict[str, Instruction]
    """Result of each computation."""
    entry: str
    """Name of the entry computation."""
    num_devices: int
    """Partitions times replicas; 0 if the header does not say."""


def parse_module(text: str) -> HloModule:
    """Return the computations of an HLO module.

    Args:
        text: Text of a whole module.

    Raises:
        ValueError: The text has no entry computation (StableHLO, or a part of a module).
    """
    computations: dict[str, Computation] = {}
    roots: dict[str, Instruction] = {}
    entry = current = None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if (head := _HEAD.match(line)) and not line.startswith("HloModule"):
            current = head[2]
            computations[current] = {}
            entry = current if head[1] else entry
        elif current and (match := _LINE.match(line)):
            instruction = _instruction(match[2], line[match.end() :])
            _add_elements(instruction, computations[current])
            computations[current][match[2]] = instruction
            if match[1]:
                roots[current] = instruction
    if entry is None:
        raise ValueError(
            "no ENTRY computation in this text: pass the HLO of a whole program, as"
            ' jitted.lower(...).as_text("hlo") or jitted.lower(...).compile().as_text() give it'
        )
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    num_devices = math.prod(map(int, sizes)) if sizes else 0
    return HloModule(computations, roots, entry, num_devices)


def _instruction(name: str, text: str) -> Instruction:
    """Return the instruction behind an equality sign: shape, opcode, arguments, attributes."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    shape = text[:end]
    remaining = text[end:].lstrip()
    opens = remaining.find("(")
    closes = _closing(remaining, opens)
    return Instruction(
        name, shape, remaining[:opens], remaining[opens + 1 : closes], remaining[closes + 1 :]
    )


def _add_elements(instruction: Instruction, computation: Computation) -> None:
    """Add a get-tuple-element for each operand `%pair#1`, as newer texts write it."""
    for name in instruction.operands if "#" in instruction.arguments else ():
        pair, _, index = name.partition("#")
        if index and pair in computation and name not in computation:
            shape = elements_of(computation[pair].shape)[int(index)]
            computation[name] = Instruction(
                name, shape, "get-tuple-element", f"%{pair}", f", index={index}"
            )


def _closing(text: str, start: int) -> int:
    """Return the index at which the parenthesis that opens at `start` closes."""
    depth = 0
    for bracket in re.compile(r"[()]").finditer(text, start):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.start()
    return len(text)


def source(name: str, computation: Computation) -> Instruction | None:
    """Return the instruction that computes a value, behind copies and sharding constraints."""
    instruction = computation.get(name)
    while instruction and _has_same_value(instruction):
        instruction = computation.get(instruction.operands[0])
    return instruction


def _has_same_value(instruction: Instruction) -> bool:
    """Return whether the result is the operand; lowered text has constraints on counters, too."""
    is_constraint = '"Sharding"' in instruction.attributes and instruction.opcode == "custom-call"
    return is_constraint or instruction.opcode in _SAME_VALUE


def constant_value(name: str, computation: Computation) -> int | None:
    """Return a value that is an integer constant, or None."""
    instruction = source(name, computation)
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.arguments) if instruction.arguments.lstrip("-").isdigit() else None


def elements_of(shape: str) -> list[str]:
    """Return the element shapes of a tuple's shape, or a list of the shape itself."""
    if not shape.startswith("("):
        return [shape]
    parts = []
    depth = 0
    begin = 1
    for at, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(shape[begin:at].strip())
            begin = at + 1
            if depth == 0:
                break
    return parts


def operand_shapes(instruction: Instruction, computation: Computation) -> list[str]:
    """Return the shapes of the operands.

    Args:
        instruction: The instruction.
        computation: Computation that has it.
    """
    return [computation[name].shape for name in instruction.operands]


def sizes_of(shape: str) -> list[int]:
    """Return the sizes of an array's dimensions."""
    match = re.search(r"\[([\d,]*)\]", shape)
    return [int(size) for size in (match[1].split(",") if match else ()) if size]


_ON_CHIP = re.compile(r"\b[a-z]\w*\[[\d,]*\]\{[^}]*S\(\d+\)[^}]*\}")


def memory_bytes_of(shape: str) -> int:
    """Return `bytes_of` without the arrays that a layout places outside device memory (`S(1)`)."""
    return bytes_of(_ON_CHIP.sub("", shape))


def bytes_of(shape: str) -> int:
    """Return the bytes of an array or of all arrays in a tuple, by the bits in the type's name."""
    total = 0
    for dtype, sizes in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        number = re.search(r"\d+", dtype)
        bits = 8 if dtype == "pred" else int(number[0]) if number else 0
        values = math.prod(int(size) for size in sizes.split(",") if size)
        total += -(-values * bits // 8)
    return total
