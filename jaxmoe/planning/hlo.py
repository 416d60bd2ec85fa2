# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The collectives of a program, read off its HLO text: kind, bytes, groups, how often.

    collectives(jitted.lower(...).as_text("hlo"))     what shard_map asks for; bf16 stays bf16
    collectives(jitted.lower(...).compile().as_text())  what the partitioner made of the rest

The walk begins at the entry and follows calls, fusions, loops and branches, so that a computation
that is called twice is counted twice, and one in a loop as often as the loop turns. Bytes are of
one device and one execution. What the texts of the backends have in common is read the same:

    asynchronous pairs   `x-start` counts, `x-done` does not; the result is the right element of the
                         tuple. The same within `async-start`.
    groups               lists `{{0,1},{2,3}}`, iota `[2,2]<=[2,2]T(1,0)`, and mesh axes
                         `mesh['a'=2,'b'=2] {'b'}` with parts of axes `'b':(1)2` and device ids.
    tuples               of an all-to-all, a combined all-reduce: summed.
    loops                `known_trip_count`, or a counter that is compared with a constant.
    all-reduce-scatter   a fusion of the TPU: one reduce-scatter, not the all-reduce inside it.
    async collectives    fused with what they overlap, on the TPU: the fusion that starts one counts
                         alone, not the dozens that carry it on and end it.

It does not see remote copies of kernels (custom calls), and takes every branch of a conditional.
Traps in comparing backends: the CPU widens bf16 collectives to f32 and prints an all-reduce where
others reduce-scatter; the GPU combines several into one tuple, so that there bytes count, not ops.

To add a kind of collective: a row in KINDS, and its bytes on the wire in `Collective.wire_bytes`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

Groups = tuple[tuple[int, ...], ...]

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
    """One collective of a program, at one place from which it is reached."""

    kind: str
    """A row of KINDS."""
    result_bytes: int
    """Of one device; a tuple's elements summed."""
    operand_bytes: int
    """Of one device; of a ragged all-to-all the rows alone."""
    groups: Groups
    """Devices that take part together, numbered as in the mesh; of a permute its pairs of source
    and target. Empty where the text does not say."""
    trip_count: int | None
    """Executions in one run of the program; None in a loop whose turns are not known."""
    name: str
    """Of the instruction."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution, by the best algorithm on a ring.

        With n devices in a group: (n-1)/n of the whole for all-gather, reduce-scatter and
        all-to-all, twice that for all-reduce, everything for the others (of a ragged all-to-all
        the worst case; of a permute what each source sends).
        """
        whole = max(self.operand_bytes, self.result_bytes)
        if self.kind in ("collective-permute", "collective-broadcast", "ragged-all-to-all"):
            return float(whole)
        others = 1 - 1 / len(self.groups[0]) if self.groups else 1.0
        return others * whole * (2 if self.kind == "all-reduce" else 1)


def collectives(text: str) -> list[Collective]:
    """The collectives of a program, in the order in which its text reaches them.

    Args:
        text: of an HLO module, lowered or compiled, for any backend.

    Raises:
        ValueError: the text has no entry computation (StableHLO, or a part of a module).
    """
    return list(_Module(text).walk())


def counts(found: Iterable[Collective]) -> dict[str, int]:
    """How often each kind runs: `{"all-gather": 4}`; kinds that do not occur are absent.

    Args:
        found: of `collectives`.

    Raises:
        ValueError: one of them is in a loop whose turns are not known.
    """
    result: dict[str, int] = collections.Counter()
    for one in found:
        if one.trip_count is None:
            raise ValueError(
                f"{one.name} ({one.kind}) is in a loop whose number of turns the program does not"
                " say: give the loop a constant bound, or count what is outside it"
            )
        result[one.kind] += one.trip_count
    return dict(result)


@dataclasses.dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names; typed (`f32[8] %x`) in old texts, without % in lowered ones."""
        if "%" in self.arguments:
            return re.findall(r"%([\w.\-]+)", self.arguments)
        return [name.strip() for name in self.arguments.split(",") if name.strip()]

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None


_Computation = dict[str, _Instruction]

_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)?(?: -> .*)? \{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_SAME_VALUE = ("bitcast", "convert", "copy")


class _Module:
    """A parsed text: instructions by computation, and the walk through them."""

    def __init__(self, text: str):
        self.computations: dict[str, _Computation] = {}
        self.roots: dict[str, _Instruction] = {}
        self.entry = None
        current = None
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            if (head := _HEAD.match(line)) and not line.startswith("HloModule"):
                current = head[2]
                self.computations[current] = {}
                self.entry = current if head[1] else self.entry
            elif current and (found := _LINE.match(line)):
                instruction = _instruction(found[2], line[found.end() :])
                self.computations[current][found[2]] = instruction
                if found[1]:
                    self.roots[current] = instruction
        if self.entry is None:
            raise ValueError(
                "no ENTRY computation in this text: pass the HLO of a whole program, as"
                ' jitted.lower(...).as_text("hlo") or jitted.lower(...).compile().as_text() give it'
            )
        sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
        self.num_devices = math.prod(map(int, sizes)) if sizes else 0

    def walk(self, name: str | None = None, turns: int | None = 1) -> Iterator[Collective]:
        """The collectives of a computation that runs `turns` times, and of all that it calls."""
        computation = self.computations.get(name or self.entry or "", {})
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
                called = _CALLED.findall(instruction.attributes)
                for branches in _BRANCHES.findall(instruction.attributes):
                    called += [branch.strip(" %") for branch in branches.split(",")]
                for inner in called:
                    yield from self.walk(inner, turns)

    def collective(
        self, kind: str, instruction: _Instruction, computation: _Computation, turns: int | None
    ) -> Collective:
        result = instruction.shape
        if instruction.opcode.endswith("-start") and kind != "all-reduce":
            result = _elements(result)[1]
        operands = instruction.operands[:1] if kind.startswith("ragged") else instruction.operands
        return Collective(
            kind=kind,
            result_bytes=_bytes(result),
            operand_bytes=sum(_bytes(computation[name].shape) for name in operands),
            groups=self.groups(instruction.attributes),
            trip_count=turns,
            name=instruction.name,
        )

    def groups(self, attributes: str) -> Groups:
        if pairs := re.search(r"source_target_pairs=(\{\{.*?\}\})", attributes):
            return _listed(pairs[1])
        everyone = (tuple(range(self.num_devices)),) if self.num_devices else ()
        _, said, text = attributes.partition("replica_groups=")
        return (_groups(text) or everyone) if said else everyone

    def is_reduce_scatter(self, fusion: _Instruction) -> bool:
        return (fusion.attribute("calls") or "").startswith("all-reduce-scatter")

    def fused_reduce_scatter(self, fusion: _Instruction, turns: int | None) -> Iterator[Collective]:
        for inner in self.walk(fusion.attribute("calls"), turns):
            if inner.kind == "all-reduce":
                inner = dataclasses.replace(
                    inner,
                    kind="reduce-scatter",
                    result_bytes=_bytes(fusion.shape),
                    name=fusion.name,
                )
            yield inner

    def loop(
        self, loop: _Instruction, computation: _Computation, turns: int | None
    ) -> Iterator[Collective]:
        count = self.trip_count(loop, computation)
        tests = bodies = None
        if turns is not None and count is not None:
            tests, bodies = turns * (count + 1), turns * count
        yield from self.walk(loop.attribute("condition"), tests)
        yield from self.walk(loop.attribute("body"), bodies)

    def trip_count(self, loop: _Instruction, computation: _Computation) -> int | None:
        """Turns of `while counter < bound: counter += step`, all three constants; else None."""
        if known := re.search(r"known_trip_count\D*(\d+)", loop.attributes):
            return int(known[1])
        body, condition = loop.attribute("body") or "", loop.attribute("condition") or ""
        test, result = self.roots.get(condition), self.roots.get(body)
        start = computation.get(loop.operands[0])
        if not (test and result and start and test.attribute("direction") == "LT"):
            return None
        counter = _source(test.operands[0], self.computations[condition])
        index = int(counter.attribute("index") or -1) if counter else -1
        if index < 0 or start.opcode != "tuple" or result.opcode != "tuple":
            return None
        step = _source(result.operands[index], self.computations[body])
        if step is None or step.opcode != "add":
            return None
        bound = _constant(test.operands[1], self.computations[condition])
        first = _constant(start.operands[index], computation)
        steps = [_constant(name, self.computations[body]) for name in step.operands]
        by = next((value for value in steps if value is not None), None)
        if bound is None or first is None or not by or by < 0:
            return None
        return max(0, math.ceil((bound - first) / by))


def _is_continued(fusion: _Instruction) -> bool:
    """Whether what is inside was started by another fusion."""
    body = fusion.attribute("calls") or ""
    return body.startswith("async_collective_fusion") or fusion.name.startswith(
        "async-collective-done"
    )


def _instruction(name: str, text: str) -> _Instruction:
    """What stands behind the equality sign: a shape, an opcode, its arguments, attributes."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opens = rest.find("(")
    closes = _closing(rest, opens)
    return _Instruction(name, shape, rest[:opens], rest[opens + 1 : closes], rest[closes + 1 :])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text)


def _source(name: str, computation: _Computation) -> _Instruction | None:
    """The instruction that computes a value, behind copies of it."""
    instruction = computation.get(name)
    while instruction and instruction.opcode in _SAME_VALUE:
        instruction = computation.get(instruction.operands[0])
    return instruction


def _constant(name: str, computation: _Computation) -> int | None:
    instruction = _source(name, computation)
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.arguments) if instruction.arguments.lstrip("-").isdigit() else None


def _elements(shape: str) -> list[str]:
    """The parts of a tuple's shape; the shape itself if it is none."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, begin = [], 0, 1
    for at, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(shape[begin:at].strip())
            begin = at + 1
            if depth == 0:
                break
    return parts


def _bytes(shape: str) -> int:
    """Bytes of an array or of all arrays in a tuple; a type's bits are the number in its name."""
    total = 0
    for dtype, sizes in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        number = re.search(r"\d+", dtype)
        bits = 8 if dtype == "pred" else int(number[0]) if number else 0
        values = math.prod(int(size) for size in sizes.split(",") if size)
        total += -(-values * bits // 8)
    return total


def _listed(text: str) -> Groups:
    groups = re.findall(r"\{([\d, ]*)\}", text)
    return tuple(tuple(int(i) for i in group.split(",")) for group in groups if group)


def _iota(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: the numbers from 0 in this shape, transposed; `[8]<=` before it: reshaped."""
    wanted, sizes, order = _parts(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    numbers = np.arange(math.prod(_integers(sizes))).reshape(_integers(sizes))
    numbers = numbers.transpose(_integers(order) if order else None)
    return numbers.reshape(_integers(wanted)) if wanted else numbers


def _groups(text: str) -> Groups:
    """Replica groups in any of the three forms, at the beginning of a text."""
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        return tuple(map(tuple, _iota(text).tolist()))
    return _listed(text[: text.find("}}") + 2]) if text.startswith("{{") else ()


def _mesh_groups(text: str) -> Groups:
    """`mesh['a'=2,'b'=4] {'b'}`; also with `, device_ids=(...)`, and `'b':(1)2` for the part of
    size 2 of b whose parts before it have size 1."""
    form = r"mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}"
    axes, ids, grouped = _parts(form, text)
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    chosen = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", grouped)
    ]
    # Every axis is cut at the bounds of its chosen parts, the first part the slowest.
    factors: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        bounds = {1, size}
        for other, before, part in chosen:
            bounds |= {before, before * part} if other == name else set()
        cuts = sorted(bounds)
        for before, after in zip(cuts, cuts[1:], strict=False):
            place[name, before] = len(factors)
            factors.append(after // before)
    devices = np.arange(math.prod(factors))
    if ids:
        devices = _iota(ids) if "]T" in ids else np.asarray(_integers(ids))
    kept = [place[name, before] for name, before, size in chosen if size > 1]
    rest = [i for i in range(len(factors)) if i not in kept]
    width = math.prod(factors[i] for i in kept)
    groups = devices.reshape(factors).transpose(rest + kept).reshape(-1, width)
    return tuple(map(tuple, groups.tolist()))


def _parts(form: str, text: str) -> tuple[str | Any, ...]:
    found = re.match(form, text)
    if found is None:
        raise ValueError(f"replica groups in a form that is not known: {text[:80]!r}")
    return found.groups()


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
