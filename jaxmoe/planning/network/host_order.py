# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Orders hosts in the mesh so that the messages of a step cross the fastest links.

Hosts fill the mesh in order: position p holds the devices p g to p g + g - 1 of the mesh, g being
the devices of a host, so an order of hosts gives each its replica, stage and part of the data.

    seconds(order) = sum over axes of  max over groups of t + 1e-3 x mean over groups of t
    t              = messages x latency + bytes / slowest link of the group's ring

The mean orders plans whose slowest groups are alike. Stages form a line, other axes rings. The
search is simulated annealing from a greedy chain (the next host is the one with the fastest link to
the last), with the moves of Pipette (DATE 2024): reverse, insert, swap, move. Classes of network
cards after Holmes (arXiv 2312.03549): hosts with the same kind of card use it, all others meet over
Ethernet. The bandwidths by class are usual ones, not measured; those of measured links, which may
differ by direction, come from `jaxmoe/planning/network/measured.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.configs import closest
from jaxmoe.planning.traffic import Traffic
from sharding import axes as ax

CARDS = {"ib": 25e9, "roce": 25e9, "ethernet": 3.125e9}
"""Bytes per second of a network card of each class: 200, 200 and 25 Gbit/s."""
_MEAN = 1e-3
_COOLING = 0.999


def parse_classes(text: str) -> tuple[str, ...]:
    """Return the class of each host.

    Args:
        text: Classes of hosts in order, such as `ib*4 roce*4`.

    Raises:
        ValueError: A class or a number is unknown.
    """
    classes: list[str] = []
    for word in text.split():
        match = re.fullmatch(r"([a-z]+)(?:\*([1-9]\d*))?", word)
        if match is None or match[1] not in CARDS:
            near = closest(word.partition("*")[0], CARDS)
            raise ValueError(
                f"hosts={text!r}: {word!r} is not a class with a number of hosts{near};"
                f" write such as 'ib*4 roce*4', of {', '.join(CARDS)}"
            )
        classes += [match[1]] * int(match[2] or 1)
    return tuple(classes)


def class_bandwidth(classes: Sequence[str]) -> Float[np.ndarray, "H H"]:
    """Return the bytes per second between hosts: those of a common class, otherwise of Ethernet.

    Args:
        classes: Class of each host, a key of CARDS.
    """
    rates = np.asarray([CARDS[name] for name in classes])
    names = np.asarray(classes)
    bandwidth = np.where(names[:, None] == names[None], rates, CARDS["ethernet"])
    np.fill_diagonal(bandwidth, np.inf)
    return bandwidth


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostExchange:
    """Messages along some axes between positions of hosts, for all reasons together."""

    axes: tuple[str, ...]
    """Mesh axes of a group."""
    bytes: float
    """Bytes that one device sends."""
    latency: float
    """Seconds of all messages without their bytes."""
    sources: Int[np.ndarray, " n"]
    """Positions of the senders, ordered by group."""
    targets: Int[np.ndarray, " n"]
    """Positions of the receivers."""
    starts: Int[np.ndarray, " groups"]
    """Index of the first message of each group."""


def exchanges(
    traffic: Iterable[Traffic], mesh: Mapping[str, int], num_hosts: int, latency: float
) -> list[HostExchange]:
    """Return the messages between hosts of a step.

    Args:
        traffic: Result of `step_traffic`.
        mesh: Size by axis, in the order of the mesh.
        num_hosts: Hosts, which divide the devices.
        latency: Seconds of a message without its bytes.

    Raises:
        ValueError: The hosts do not divide the devices.
    """
    size = math.prod(mesh.values())
    if num_hosts < 1 or size % num_hosts:
        raise ValueError(f"hosts={num_hosts} must divide the {size} devices of the mesh")
    per_host = size // num_hosts
    names = list(mesh)
    places = np.arange(size).reshape(tuple(mesh.values()))
    by_axes: dict[tuple[str, ...], list[Traffic]] = {}
    for entry in traffic:
        by_axes.setdefault(entry.axes, []).append(entry)
    result = []
    for axes, reasons in by_axes.items():
        last = [names.index(axis) for axis in axes]
        number = math.prod(mesh[axis] for axis in axes)
        rings = np.moveaxis(places, last, range(-len(last), 0)).reshape(-1, number)
        following = np.roll(rings, -1, axis=1)
        if axes == (ax.STAGE,):
            rings = rings[:, :-1]
            following = following[:, :-1]
        groups = np.repeat(np.arange(len(rings)), rings.shape[1])
        pairs = np.stack([groups, rings.ravel() // per_host, following.ravel() // per_host])
        pairs = np.unique(pairs[:, pairs[1] != pairs[2]], axis=1)
        if not pairs.size:
            continue
        _, starts = np.unique(pairs[0], return_index=True)
        result.append(
            HostExchange(
                axes=axes,
                bytes=sum(entry.bytes for entry in reasons),
                latency=latency * sum(entry.messages for entry in reasons),
                sources=pairs[1],
                targets=pairs[2],
                starts=starts,
            )
        )
    return result


@functools.lru_cache(maxsize=4096)
def slowest_link(
    axes: tuple[str, ...],
    mesh: tuple[tuple[str, int], ...],
    host_links: tuple[tuple[float, ...], ...],
) -> float | None:
    """Return the bytes per second of the slowest link between hosts of some axes.

    Args:
        axes: Mesh axes of the devices that communicate.
        mesh: Size by axis, in the order of the mesh.
        host_links: Bytes per second from the host at each position to that at each other.

    Returns:
        None if the axes do not leave a host.

    Raises:
        ValueError: The hosts do not divide the devices.
    """
    sizes = dict(mesh)
    number = math.prod(sizes[axis] for axis in axes)
    unit_traffic = Traffic(reason="", axes=axes, num_devices=number, bytes=1.0, messages=0.0)
    links = np.asarray(host_links)
    crossing = exchanges([unit_traffic], sizes, len(links), 0.0)
    return min((float(links[e.sources, e.targets].min()) for e in crossing), default=None)


def order_seconds(
    order: Int[np.ndarray, " H"],
    exchanges_in_step: Sequence[HostExchange],
    bandwidth: Float[np.ndarray, "H H"],
) -> float:
    """Return the seconds of a step's messages between hosts.

    Args:
        order: Host at each position.
        exchanges_in_step: Result of `exchanges`.
        bandwidth: Bytes per second from a host to another.
    """
    total = 0.0
    for exchange in exchanges_in_step:
        rates = bandwidth[order[exchange.sources], order[exchange.targets]]
        times = exchange.latency + exchange.bytes / np.minimum.reduceat(rates, exchange.starts)
        total += float(times.max() + _MEAN * times.mean())
    return total


def greedy_order(bandwidth: Float[np.ndarray, "H H"]) -> Int[np.ndarray, " H"]:
    """Return a chain of hosts, each followed by the one with the fastest link to it.

    Args:
        bandwidth: Bytes per second from a host to another.
    """
    order = [0]
    remaining = set(range(1, len(bandwidth)))
    while remaining:
        order.append(max(remaining, key=lambda host: (bandwidth[order[-1], host], -host)))
        remaining.remove(order[-1])
    return np.asarray(order)


def best_order(
    exchanges_in_step: Sequence[HostExchange],
    bandwidth: Float[np.ndarray, "H H"],
    *,
    moves: int = 20_000,
    seed: int = 0,
) -> tuple[Int[np.ndarray, " H"], float]:
    """Return the best order of the annealing, and its seconds.

    Args:
        exchanges_in_step: Result of `exchanges`.
        bandwidth: Bytes per second from a host to another.
        moves: Number of moves to try.
        seed: Seed of the moves.
    """
    rng = np.random.default_rng(seed)
    order = greedy_order(bandwidth)
    plain = np.arange(len(order))
    seconds = order_seconds(order, exchanges_in_step, bandwidth)
    best = order
    least = seconds
    if (
        plain_seconds := order_seconds(plain, exchanges_in_step, bandwidth)
    ) <= least:  # no reason to reorder
        order = plain
        best = plain
        seconds = plain_seconds
        least = plain_seconds
    if len(order) < 2 or not exchanges_in_step:
        return best, least
    scale = max(least, 1e-30)
    temperature = 1.0
    for _ in range(moves):
        moved = _move(order, rng)
        seconds_moved = order_seconds(moved, exchanges_in_step, bandwidth)
        if seconds_moved <= seconds or rng.random() < math.exp(
            (seconds - seconds_moved) / scale / temperature
        ):
            order = moved
            seconds = seconds_moved
            if seconds < least:
                best = order
                least = seconds
        temperature = max(_COOLING * temperature, 1e-9)
    return best, least


def _move(order: Int[np.ndarray, " H"], rng: np.random.Generator) -> Int[np.ndarray, " H"]:
    """Return a neighbour of an order by one of the four moves."""
    kind, (first, last) = rng.integers(4), np.sort(rng.choice(len(order), 2, replace=False))
    if kind == 0:  # reverse a part
        return np.concatenate([order[:first], order[first : last + 1][::-1], order[last + 1 :]])
    if kind == 1:  # swap two hosts
        moved = order.copy()
        moved[[first, last]] = moved[[last, first]]
        return moved
    if kind == 2:  # insert a host elsewhere
        return np.insert(np.delete(order, first), last, order[first])
    part, remaining = (
        order[first : last + 1],
        np.delete(order, np.s_[first : last + 1]),
    )  # move a part
    return np.insert(remaining, int(rng.integers(len(remaining) + 1)), part)
