# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads from a scheduled program for TPUs what runs between the ends of its collectives."""

import re
from typing import NamedTuple

from jaxmoe.planning.hlo.text import bytes_of

_KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
_CALLED = re.compile(r"(?:calls|body|true_computation|false_computation)=%?([\w.\-]+)")
_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)")


class Span(NamedTuple):
    """An asynchronous collective, from its start to its done."""

    kind: str
    size: int
    """Bytes of its result."""
    products: int
    """Products, kernels, and loops and fusions that hold one, between start and done."""


def spans(text: str) -> list[Span]:
    """Return the asynchronous collectives of a program.

    Args:
        text: Text of a compiled program, whose instructions are in the order of execution.
    """
    return _spans(text, _KINDS, "")


def host_copies(text: str) -> list[Span]:
    """Return the copies of a program between the memories of device and host.

    Args:
        text: See `spans`.
    """
    return _spans(text, "copy", "S(5)")


def _spans(text: str, kinds: str, memory: str) -> list[Span]:
    computations = _computations(text)
    products: dict[str, bool] = {}
    found = []
    for lines in computations.values():
        pending: dict[str, tuple[str, int]] = {}
        for line in lines:
            matched = _LINE.match(line)
            if matched is None:
                continue
            name, rest = matched[1], matched[2]
            start = re.search(rf" ({kinds})-start\(", rest)
            done = re.search(rf" (?:{kinds})-done\(%?([\w.\-]+)\)", rest)
            if start and memory in rest:
                pending[name] = (start[1], 0)
            elif done and done[1] in pending:
                kind, number = pending.pop(done[1])
                found.append(Span(kind, bytes_of(rest[: done.start()]), number))
            elif _has_product(rest, computations, products):
                pending = {key: (kind, number + 1) for key, (kind, number) in pending.items()}
    return found


def _computations(text: str) -> dict[str, list[str]]:
    """Return the lines of each computation by its name."""
    computations: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.endswith("{") and (head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)):
            name = head[1]
            computations[name] = []
        elif name:
            computations[name].append(line)
    return computations


def _has_product(line: str, computations: dict[str, list[str]], products: dict[str, bool]) -> bool:
    """Return whether an instruction is a product or a kernel, or calls one."""
    if re.search(r" (convolution|dot)\(|tpu_custom_call", line):
        return True
    for name in _CALLED.findall(line):
        if name not in products:
            lines = computations.get(name, [])
            products[name] = any(_has_product(one, computations, products) for one in lines)
        if products[name]:
            return True
    return False
