# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the collectives of a program from its HLO text: kind, bytes, groups, executions.

    collectives(jitted.lower(...).as_text("hlo"))     what shard_map asks for; bf16 stays bf16
    collectives(jitted.lower(...).compile().as_text())  what the partitioner made of the rest

The walk starts at the entry and follows calls, fusions, loops and branches: a computation that is
called twice counts twice, and one in a loop as often as the loop turns. Bytes are per device and
execution. Forms that the walk understands:

    asynchronous pairs   `x-start` counts, `x-done` does not; the result is the second element of
                         the tuple. The same inside `async-start`.
    groups               lists `{{0,1},{2,3}}`, iota `[2,2]<=[2,2]T(1,0)`, and mesh axes
                         `mesh['a'=2,'b'=2] {'b'}` with parts of axes `'b':(1)2` and device ids.
    tuples               results of an all-to-all or a combined all-reduce: summed.
    loops                `known_trip_count`, or a counter that is compared with a constant; either
                         may stand behind sharding constraints.
    all-reduce-scatter   a TPU fusion: one reduce-scatter, not the all-reduce inside it.
    async collectives    fused with overlapping work on the TPU: only the fusion that starts one
                         counts, not those that continue and end it.

Remote copies in kernels (custom calls) are not counted, and every branch of a conditional is.
When comparing backends: the CPU widens bf16 collectives to f32 and prints an all-reduce where
others reduce-scatter; the GPU combines several into one tuple, so compare bytes there, not counts.

To add a kind of collective: KINDS and `Collective.wire_bytes` in
`jaxmoe/planning/hlo/collectives.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from jaxmoe.planning.hlo.groups import Groups, parse_groups, parse_lists
from jaxmoe.planning.hlo.text import (
    Computation,
    HloModule,
    Instruction,
    bytes_of,
    constant_value,
    elements_of,
    operand_shapes,
    parse_module,
    source,
)

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective of a program, once for each call site."""

    kind: str
    """Row of KINDS."""
    result_bytes: int
    """Bytes of the result on one device, summed over a tuple."""
    operand_bytes: int
    """Bytes of the operands on one device; only the rows of a ragged all-to-all."""
    groups: Groups
    """Groups of devices, numbered as in the mesh; (source, target) pairs of a permute. Empty if the
    text has none."""
    trip_count: int | None
    """Executions in one run of the program; None in a loop with an unknown trip count."""
    name: str
    """Name of the instruction."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution, by the best algorithm on a ring.

        With n devices in a group: (n-1)/n of the whole for all-gather, reduce-scatter and
        all-to-all, twice that for all-reduce, the whole for the others (the worst case of a ragged
        all-to-all; what each source of a permute sends).
        """
        num_bytes = max(self.operand_bytes, self.result_bytes)
        if self.kind in ("collective-permute", "collective-broadcast", "ragged-all-to-all"):
            return float(num_bytes)
        remote_share = 1 - 1 / len(self.groups[0]) if self.groups else 1.0
        return remote_share * num_bytes * (2 if self.kind == "all-reduce" else 1)


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a program, in the order of the walk.

    Args:
        text: Text of an HLO module, lowered or compiled, for any backend.

    Raises:
        ValueError: The text has no entry computation (StableHLO, or a part of a module).
    """
    return list(_CollectiveWalk(text).walk())


_CALLED = re.compile(r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


class _CollectiveWalk:
    """The walk through a module's computations."""

    def __init__(self, text: str):
        self.module = module = parse_module(text)
        self.computations = module.computations
        self.entry = module.entry
        self.num_devices = module.num_devices

    def walk(self, name: str | None = None, turns: int | None = 1) -> Iterator[Collective]:
        """Yield the collectives of a computation that runs `turns` times, and of all it calls."""
        computation = self.computations.get(name or self.entry, {})
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in KINDS:
                yield self.collective(kind, instruction, computation, turns)
            elif instruction.opcode == "while":
                yield from self.loop(instruction, computation, turns)
            elif instruction.opcode == "fusion" and _is_continued(instruction):
                continue
            elif instruction.opcode == "fusion" and self.is_reduce_scatter(instruction):
                yield from self.fused_reduce_scatter(instruction, turns)
            elif not instruction.opcode.endswith(("-done", "-update")):
                for inner in called_by(instruction):
                    yield from self.walk(inner, turns)

    def collective(
        self, kind: str, instruction: Instruction, computation: Computation, turns: int | None
    ) -> Collective:
        result = instruction.shape
        if instruction.opcode.endswith("-start") and kind != "all-reduce":
            result = elements_of(result)[1]
        operands = operand_shapes(instruction, computation)
        return Collective(
            kind=kind,
            result_bytes=bytes_of(result),
            operand_bytes=sum(
                map(bytes_of, operands[:1] if kind.startswith("ragged") else operands)
            ),
            groups=self.groups(instruction.attributes),
            trip_count=turns,
            name=instruction.name,
        )

    def groups(self, attributes: str) -> Groups:
        if pairs := re.search(r"source_target_pairs=(\{\{.*?\}\})", attributes):
            return parse_lists(pairs[1])
        everyone = (tuple(range(self.num_devices)),) if self.num_devices else ()
        _, separator, text = attributes.partition("replica_groups=")
        return (parse_groups(text) or everyone) if separator else everyone

    def is_reduce_scatter(self, fusion: Instruction) -> bool:
        return (fusion.attribute("calls") or "").startswith("all-reduce-scatter")

    def fused_reduce_scatter(self, fusion: Instruction, turns: int | None) -> Iterator[Collective]:
        for inner in self.walk(fusion.attribute("calls"), turns):
            if inner.kind == "all-reduce":
                inner = dataclasses.replace(
                    inner,
                    kind="reduce-scatter",
                    result_bytes=bytes_of(fusion.shape),
                    name=fusion.name,
                )
            yield inner

    def loop(
        self, loop: Instruction, computation: Computation, turns: int | None
    ) -> Iterator[Collective]:
        count = trip_count(self.module, loop, computation)
        tests = bodies = None
        if turns is not None and count is not None:
            tests = turns * (count + 1)
            bodies = turns * count
        yield from self.walk(loop.attribute("condition"), tests)
        yield from self.walk(loop.attribute("body"), bodies)


def trip_count(module: HloModule, loop: Instruction, computation: Computation) -> int | None:
    """Return the turns of `while counter < bound: counter += step` with constants, or None.

    Args:
        module: Module with the loop.
        loop: The while instruction.
        computation: Computation that has it.
    """
    if match := re.search(r"known_trip_count\D*(\d+)", loop.attributes):
        return int(match[1])
    body = loop.attribute("body") or ""
    condition = loop.attribute("condition") or ""
    test = module.roots.get(condition)
    result = module.roots.get(body)
    start = computation.get(loop.operands[0])
    if not (test and result and start and test.attribute("direction") == "LT"):
        return None
    tests = module.computations[condition]
    steps = module.computations[body]
    counter = source(test.operands[0], tests)
    index = int(counter.attribute("index") or -1) if counter else -1
    if index < 0 or start.opcode != "tuple" or result.opcode != "tuple":
        return None
    step = source(result.operands[index], steps)
    if step is None or step.opcode != "add":
        return None
    bound = constant_value(test.operands[1], tests)
    first = constant_value(start.operands[index], computation)
    by = next((n for name in step.operands if (n := constant_value(name, steps)) is not None), None)
    if bound is None or first is None or not by or by < 0:
        return None
    return max(0, math.ceil((bound - first) / by))


def called_by(instruction: Instruction) -> list[str]:
    """Return the computations that an instruction calls, all branches included."""
    called = _CALLED.findall(instruction.attributes)
    for branches in _BRANCHES.findall(instruction.attributes):
        called += [branch.strip(" %") for branch in branches.split(",")]
    return called


def _is_continued(fusion: Instruction) -> bool:
    """Return whether a fusion continues a collective that another fusion started."""
    body = fusion.attribute("calls") or ""
    return body.startswith("async_collective_fusion") or fusion.name.startswith(
        "async-collective-done"
    )
