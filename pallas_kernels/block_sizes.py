# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Into blocks of which sizes a kernel cuts its operands: measured where somebody has, else by rule.

    choose(operation, dtypes, shape, default, fits)   the sizes, and why these, in words
    trial(operation, sizes)                           inside: these sizes, whatever the table says

Sizes lie in `measured_block_sizes.py` by operation, kind of device and bucket: the dtypes of the
operands and the shape, every length rounded up to a power of two. Asked for is the nearest bucket
of the same dtypes, none of whose lengths is more than 4 times another; what lies there and does not
fit this shape is passed over. Where nothing is left the kernel's own rule holds, which must fit
whatever is asked.

    python -m experiments.bench blocks

measures candidates on the device at hand and writes that file. It knows no kernel: names of sizes
("m", "k", "n", "stages") are the kernel's own, and so is what fits.

To add an operation: call `choose` where its grid is made, and add its candidates to the command.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from pallas_kernels.backend import device_kind
from pallas_kernels.measured_block_sizes import BLOCK_SIZES, Table

NEAR = 4
"""A length may be so many times as large as that of a bucket, or as small a part of it."""

Fits = Callable[[Mapping[str, int]], bool]


class BlockSizes(NamedTuple):
    """What a kernel uses."""

    sizes: Mapping[str, int]
    """By the kernel's names."""
    reason: str
    """Where they come from."""


class Asked(NamedTuple):
    """One question that came while sizes were on trial."""

    bucket: str
    default: Mapping[str, int]
    """What the kernel's rule says."""
    fits: Fits


class _Trial(NamedTuple):
    sizes: Mapping[str, int]
    asked: list[Asked]


_TRIALS: contextvars.ContextVar[Mapping[str, _Trial] | None] = contextvars.ContextVar(
    "block_sizes", default=None
)


def choose(
    operation: str,
    dtypes: str,
    shape: Mapping[str, int],
    default: Mapping[str, int],
    fits: Fits = lambda sizes: True,
    *,
    table: Table = BLOCK_SIZES,
) -> BlockSizes:
    """The sizes of blocks for one call.

    Args:
        operation: Of the table, `Operation.name` or that of one of its kernels.
        dtypes: Of the operands, such as "int8 x int4".
        shape: Lengths by name, such as m, k, n.
        default: What the kernel's rule says; it must fit.
        fits: Whether the kernel can run with these sizes: memory, divisibility.
        table: Of measured sizes.

    Raises:
        ValueError: Sizes on trial that the kernel cannot take.
    """
    if (tried := (_TRIALS.get() or {}).get(operation)) is not None:
        tried.asked.append(Asked(bucket(dtypes, shape), default, fits))
        sizes = {**default, **tried.sizes}
        if sizes.keys() != default.keys() or not fits(sizes):
            raise ValueError(
                f"{operation}: blocks {in_words(tried.sizes)} do not fit {bucket(dtypes, shape)}:"
                f" choose others, near {in_words(default)}."
            )
        return BlockSizes(sizes, "on trial")
    kind = device_kind()
    measured = table.get(operation, {}).get(kind, {})
    for name in sorted(measured, key=lambda name: _distance(name, dtypes, shape)):
        if math.isinf(_distance(name, dtypes, shape)):
            break
        sizes = _lengths(measured[name])
        if sizes.keys() == default.keys() and fits(sizes):
            return BlockSizes(sizes, f"measured on {kind} for {name}")
    why = "none of those measured near this shape" if measured else f"none measured on {kind}"
    return BlockSizes(default, f"by rule: {why}")


@contextlib.contextmanager
def trial(operation: str, sizes: Mapping[str, int]) -> Iterator[list[Asked]]:
    """Gives the operation these sizes in all that is traced inside: what was traced before stays.

    Args:
        operation: As `choose` knows it.
        sizes: By name; those not given keep the kernel's rule.

    Yields:
        What is asked meanwhile, in a list that grows.
    """
    asked: list[Asked] = []
    token = _TRIALS.set({**(_TRIALS.get() or {}), operation: _Trial(sizes, asked)})
    try:
        yield asked
    finally:
        _TRIALS.reset(token)


def bucket(dtypes: str, shape: Mapping[str, int]) -> str:
    """The name of the bucket of a shape: "int8 x int4, m=32 k=2048 n=1024".

    Args:
        dtypes: As `choose` takes them.
        shape: Lengths by name.
    """
    rounded = {name: 1 << max(0, length - 1).bit_length() for name, length in shape.items()}
    return f"{dtypes}, {in_words(rounded)}"


def in_words(sizes: Mapping[str, int]) -> str:
    """Sizes as they stand in the table: "m=32 k=1024 n=512".

    Args:
        sizes: By name.
    """
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def _lengths(text: str) -> dict[str, int]:
    return {name: int(length) for name, length in (part.split("=") for part in text.split())}


def _distance(name: str, dtypes: str, shape: Mapping[str, int]) -> float:
    """How far a bucket lies from a shape: the sum of doublings; infinite where too far."""
    theirs, lengths = name.split(", ")
    there = _lengths(lengths)
    if theirs != dtypes or there.keys() != shape.keys():
        return math.inf
    doublings = [abs(math.log2(max(1, shape[key]) / there[key])) for key in shape]
    return sum(doublings) if max(doublings) <= math.log2(NEAR) else math.inf
