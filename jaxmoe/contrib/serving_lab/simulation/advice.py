# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses page size, batch and where keys and values wait, with the number that decides each.

The rules, for each kind of attention:

    page size    fewest tokens, a power of two, whose keys and values of one layer are 32 KiB: an
                 assumption on how long a read must be to reach the bandwidth of the memory
    batch        doubled until tokens per second grow by less than 10%, or the memory is full
    preempted    to host memory if reading the keys and values back takes less time than computing
                 the tokens again
    weights      on the device if they fit beside one request
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxmoe.contrib.serving_lab.simulation.cost import Roofline
from jaxmoe.serve.facts import WorkPart

READ_BYTES = 32 * 1024
"""Bytes of one layer of a page."""
LEAST_GAIN = 1.1
"""Tokens per second after doubling the batch, over those before, that are worth it."""
_LARGEST_PAGE = 256
_LARGEST_BATCH = 4096


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One choice."""

    subject: str
    choice: str
    because: str
    """The number that decides, and what it is compared with."""


def advise(cost: Roofline, prompt: int, answer: int) -> Iterator[Advice]:
    """Yield the choices for one model and device.

    Args:
        cost: Cost model of an instance.
        prompt: Tokens of a usual prompt.
        answer: Tokens of a usual answer.
    """
    yield from (_page_size(cost, prompt + answer), _batch(cost, prompt, answer))
    yield from (_preempt(cost, prompt + answer // 2), _weights(cost, prompt + answer))


def _page_size(cost: Roofline, length: int) -> Advice:
    token = cost.sizes.kv_bytes / cost.sizes.num_layers
    size = 1
    while size < _LARGEST_PAGE and size * token < READ_BYTES:
        size *= 2
    wasted = (size - 1) / 2 / length
    return Advice(
        subject="page size",
        choice=f"{size} tokens",
        because=(
            f"{size * token / 1024:.1f} KiB of a layer per page, against {READ_BYTES // 1024};"
            f" {wasted:.1%} of a request left empty"
        ),
    )


def _batch(cost: Roofline, prompt: int, answer: int) -> Advice:
    room = cost.num_pages(1) // (prompt + answer)
    rates: dict[int, float] = {}

    def rate(size: int) -> float:
        if size not in rates:
            part = WorkPart(1, prompt + answer // 2)
            rates[size] = size / cost.seconds([part] * size)
        return rates[size]

    size = 1
    while 2 * size <= min(room, _LARGEST_BATCH) and rate(2 * size) >= LEAST_GAIN * rate(size):
        size *= 2
    if 2 * size > room:
        because = f"memory holds {room} requests of {prompt + answer} tokens"
    elif 2 * size > _LARGEST_BATCH:
        because = f"larger batches than {_LARGEST_BATCH} were not compared"
    else:
        gain = rate(2 * size) / rate(size) - 1
        because = f"{2 * size} write {gain:.1%} more tokens per second, against 10%"
    return Advice(
        subject="batch",
        choice=f"{size} answers, {rate(size):.0f} tokens/s",
        because=because,
    )


def _preempt(cost: Roofline, length: int) -> Advice:
    back = length * cost.sizes.kv_bytes / (cost.chip.host_bandwidth * cost.num_chips)
    again = cost.seconds([WorkPart(length)])
    return Advice(
        subject="preempted",
        choice="to host memory" if back < again else "computed again",
        because=(
            f"{length} tokens: {1e3 * back:.3g} ms to read back, {1e3 * again:.3g} ms to compute"
        ),
    )


def _weights(cost: Roofline, length: int) -> Advice:
    room = cost.chip.available * cost.num_chips
    needed = cost.weight_bytes + length * cost.sizes.kv_bytes
    share = f"{cost.spill_share:.0%} in host memory" if cost.spill_share else "on the device"
    return Advice(
        subject="weights",
        choice=share,
        because=(
            f"{needed / 1e9:.3g} GB with one request, {room / 1e9:.3g} GB of memory"
            + (", of which a tenth is for pages" if cost.spill_share else "")
        ),
    )
