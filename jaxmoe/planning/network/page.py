# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`NetworkConfig` and the lines of a plan about the network between hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.network.fabric import (
    Fabric,
    exact_parts,
    flows_of,
    single_path_bound,
    spray_bytes,
    spreads,
)
from jaxmoe.planning.network.host_order import (
    best_order,
    class_bandwidth,
    exchanges,
    order_seconds,
    parse_classes,
)
from jaxmoe.planning.network.links import LinkTable
from jaxmoe.planning.network.measured import host_bandwidth, linked_chip
from jaxmoe.planning.step_time import seconds_of
from jaxmoe.planning.traffic import step_traffic

MEASURED = "measured"
"""Value of network.hosts for hosts whose links were measured."""
HostLinks = tuple[tuple[float, ...], ...]
"""Bytes per second from the host at each position of the mesh to that at each other."""
_ALL_TO_ALL = ("rows", "shuffle")
"""Reasons of traffic in which each device sends to all others."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """Network between the hosts of a plan."""

    links: str | None = None
    """Path of a links.json of `jaxmoe doctor --links` on these devices; None uses
    nominal rates alone."""
    overlap: float = 0.0
    """Share of the time of products beside which weights are gathered and gradients reduced; 0
    hides nothing, 1 as much as fits."""
    hosts: str = ""
    """Classes of the hosts' network cards in order, such as "ib*4 roce*4", or "measured" for the
    links between processes of network.links. Plans are priced with them, and the best
    --processes.order is printed. Classes are ib, roce, ethernet."""
    spines: int = 0
    """Spine switches of a leaf-spine network, whose congestion is printed; 0 prints none."""
    devices_per_leaf: int = 32
    """Devices under one leaf switch."""

    def __post_init__(self):
        if self.hosts != MEASURED:
            parse_classes(self.hosts)
        elif self.links is None:
            raise ValueError(
                f"network.hosts={MEASURED} reads the links between processes, and network.links is"
                " None: name a links.json of jaxmoe doctor --links --pairs processes"
            )
        if not 0.0 <= self.overlap <= 1.0:
            raise ValueError(f"network.overlap={self.overlap} must be from 0 to 1")
        if self.spines < 0:
            raise ValueError(f"network.spines={self.spines} must be 0 (no fabric) or more")
        if self.devices_per_leaf < 1:
            raise ValueError(f"network.devices_per_leaf={self.devices_per_leaf} must be at least 1")


def network_lines(config: NetworkConfig, plan: StepPlan, chip: Chip) -> list[str]:
    """Return the lines of the plan: measured links, order of hosts, congestion; none by default.

    Args:
        config: What is asked for.
        plan: Step on its mesh.
        chip: Properties of each device.

    Raises:
        ValueError: The hosts do not divide the devices, or links.json cannot be read or is of
            other devices.
    """
    lines: list[str] = []
    if config.links is not None:
        lines += _measure(LinkTable.load(config.links), plan, chip)
    if config.hosts:
        lines += _hosts(*_bandwidths(config, plan.mesh.size), plan, chip)
    if config.spines:
        lines += _fabric(config, plan, chip)
    return lines


def _measure(table: LinkTable, plan: StepPlan, chip: Chip) -> Iterator[str]:
    mesh = dict(plan.mesh.shape)
    linked = linked_chip(chip, table)
    yield f"measured links       of {len(table.devices)} x {table.device_kind}"
    for entry in step_traffic(plan):
        seconds = seconds_of(entry, mesh, linked)
        nominal = seconds_of(entry, mesh, dataclasses.replace(chip, rates=()))
        is_known = linked.measured_rate(entry.axes) is not None
        text = f"{seconds:.3g} s measured" if is_known else "not measured"
        yield f"  {entry.reason} over {' x '.join(entry.axes)}: {text}, {nominal:.3g} s nominal"


def host_links(config: NetworkConfig, num_devices: int, order: Sequence[int] = ()) -> HostLinks:
    """Return the bytes per second between the hosts at the positions of the mesh.

    Args:
        config: Network; without hosts nothing is known.
        num_devices: Devices of the plan.
        order: Host at each position (`processes.order`); as given if empty.

    Raises:
        ValueError: The hosts do not divide the devices or are not those of the order, or
            links.json cannot be read or is of other devices.
    """
    if not config.hosts:
        return ()
    bandwidth, _ = _bandwidths(config, num_devices)
    if num_devices % len(bandwidth) or len(order) not in (0, len(bandwidth)):
        raise ValueError(
            f"network.hosts has {len(bandwidth)} hosts, which must divide the {num_devices} devices"
            f" and be those of processes.order ({len(order) or 'none'})"
        )
    places = list(order) or list(range(len(bandwidth)))
    return tuple(tuple(row) for row in bandwidth[np.ix_(places, places)].tolist())


def _bandwidths(
    config: NetworkConfig, num_devices: int
) -> tuple[Float[np.ndarray, "H H"], tuple[str, ...]]:
    """Return the bytes per second between hosts, and the class of each if they are by class."""
    if config.links is not None and config.hosts == MEASURED:
        table = LinkTable.load(config.links)
        if len(table.devices) != num_devices:
            raise ValueError(
                f"network.links={config.links} has {len(table.devices)} devices and the plan"
                f" {num_devices}: measure the devices of the plan, or give classes of hosts"
            )
        return host_bandwidth(table), ()
    classes = parse_classes(config.hosts)
    return class_bandwidth(classes), classes


def _hosts(
    bandwidth: Float[np.ndarray, "H H"], classes: tuple[str, ...], plan: StepPlan, chip: Chip
) -> Iterator[str]:
    mesh = dict(plan.mesh.shape)
    exchanges_in_step = exchanges(step_traffic(plan), mesh, len(bandwidth), chip.link_latency)
    order, seconds = best_order(exchanges_in_step, bandwidth)
    plain = order_seconds(np.arange(len(order)), exchanges_in_step, bandwidth)
    yield (
        f"order of hosts       {seconds:.3g} s of messages between hosts, {plain:.3g} s as given:"
        f" --processes.order {' '.join(map(str, order))}"
    )
    if classes:
        yield f"  classes in order: {' '.join(classes[host] for host in order)}"


def _fabric(config: NetworkConfig, plan: StepPlan, chip: Chip) -> Iterator[str]:
    mesh = dict(plan.mesh.shape)
    fabric = Fabric(
        devices_per_leaf=config.devices_per_leaf,
        spines=config.spines,
        # Not oversubscribed: a leaf sends up what its devices can send.
        link_bandwidth=chip.far_bandwidth * config.devices_per_leaf / config.spines,
    )
    yield (
        f"leaf-spine network   {config.spines} spines, {config.devices_per_leaf} devices under a"
        " leaf; load of the fullest link over that of spraying"
    )
    for entry in step_traffic(plan):
        kind = "all-to-all" if entry.reason in _ALL_TO_ALL else "collective-permute"
        flows = flows_of(kind, entry.axes, entry.bytes, mesh, fabric)
        ideal = spray_bytes(flows, fabric)
        if not ideal:
            continue
        shown = ", ".join(f"{way.name} {way.congestion:.2f}" for way in spreads(flows, fabric))
        parts = max(exact_parts(int(n), fabric.spines) for n in flows.count[flows.count > 0].flat)
        yield (
            f"  {entry.reason} over {' x '.join(entry.axes)}: {shown} ({parts} parts); one path"
            f" at most"
            f" {single_path_bound(flows, fabric):.2f};"
            f" {ideal / fabric.link_bandwidth:.3g} s sprayed"
        )
