# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Table of devices with their memory, FLOP/s and links, and the topologies made of them.

    tpu:v5e:16x16     a slice of a TPU pod by its torus
    gpu:h100:8        a number of GPUs, eight per host
    cpu:8             fake devices of this machine

Sources: TPU memory, bandwidth, FLOP/s and bandwidth between chips from cloud.google.com/tpu/docs
(system architecture, a page for each generation); GPUs from the data sheets of NVIDIA (dense, SXM
form) and AMD. FLOP/s of the kinds that JAX can name are those of
`jaxmoe.training.measures.throughput`. Approximate: `link_latency` (a few microseconds per hop,
without a source), `reserved` (memory of the runtime: the compiler of v5e reports 15.75 GiB of 16),
the bandwidth of a network card per GPU (one 400 Gbit/s adapter), the links of the MI250X (not
verified), `idle_watts` and `peak_watts` (the power limit of the form of the device where it is
published, else an estimate; idle an eighth or so of it), and all of "cpu". What kernels reach was
measured on one H100 (`pallas_kernels/measured.py`); other GPUs are assumed to reach the same shares
of their peaks. Link bandwidth is that of one device in one direction along one mesh axis. On a
torus an axis that spans a ring has two links, one each way round, and both count. DCN between
slices is not modelled.

To add a device: a row of CHIPS in `jaxmoe/planning/hardware.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from jaxmoe.configs import closest
from jaxmoe.planning.network.links import LinkRate, slowest

Platform = Literal["tpu", "gpu", "cpu"]

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelRates:
    """What the kernels of one device reach: bytes or FLOPs per second."""

    copy: float
    """Bytes read and written per second."""
    product: float
    """FLOP/s of dense bfloat16 products."""
    product_float32: float
    """FLOP/s of dense float32 products, which enter as TF32."""
    product_8bit: float
    """FLOP/s of dense products of 8-bit values."""
    grouped: float
    """FLOP/s of products with the weights of experts."""
    attention: float
    """FLOP/s of attention's forward pass, visible pairs only."""
    attention_both: float
    """The same of both passes together, 3.5 times the FLOPs of the forward pass."""

    @property
    def attention_backward(self) -> float:
        """FLOP/s of attention's backward pass, 2.5 times the FLOPs of the forward pass."""
        return 2.5 / (3.5 / self.attention_both - 1 / self.attention)

    def scale(self, flops: float, bandwidth: float) -> KernelRates:
        """Return the rates of a device with another multiple of FLOP/s and of bandwidth.

        Args:
            flops: FLOP/s over those of this device.
            bandwidth: Bytes per second of its memory over those of this device.
        """
        names = (field.name for field in dataclasses.fields(self))
        values = {name: getattr(self, name) * flops for name in names if name != "copy"}
        return KernelRates(copy=self.copy * bandwidth, **values)


H100_RATES = KernelRates(
    copy=2.93e12,
    product=700e12,
    product_float32=395e12,
    product_8bit=892e12,
    grouped=600e12,
    attention=490e12,
    attention_both=373e12,
)
"""Measured on one H100 on 2026-11-27: a copy of 512 MB, products of 8192^3 in bfloat16 and float8,
the head's products in float32, the products of OLMoE's experts, causal attention of 4 x 4096."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """Properties of one device as JAX counts them."""

    platform: Platform
    memory: int
    """Bytes of device memory."""
    reserved: int
    """Bytes that the runtime reserves; approximate."""
    flops: float
    """Dense bfloat16 peak, FLOP/s."""
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second that one device sends along one axis, within the fast network."""
    far_bandwidth: float
    """Bytes per second between hosts of GPUs; for TPUs that of the link, which spans hosts."""
    host_bandwidth: float = 16e9
    """Bytes per second between the device and host memory; an assumption, not measured."""
    disk_bandwidth: float = 3e9
    """Bytes per second that all devices of a host together read from a disk or write to it, both at
    once; an assumption (one NVMe drive), not measured."""
    link_latency: float = 1e-6
    """Seconds for one message to the next device; approximate."""
    idle_watts: float = 0.0
    """Watts of a device that waits; approximate."""
    peak_watts: float = 0.0
    """Watts at the peak of FLOP/s; approximate."""
    domain: int = 0
    """Devices on the fast network; 0 means all."""
    package: int = 1
    """Devices that share a package, and a faster link than the fast network."""
    package_bandwidth: float = 0.0
    """Bytes per second between two devices of a package."""
    torus: int = 0
    """Dimensions of the torus of a TPU; 0 for others."""
    efficiency: float = 0.6
    """Share of the peak that matrix products reach: an assumption, or measured by a run."""
    overlap: float = 0.0
    """Share of the time of products beside which weights are gathered and gradients reduced: an
    assumption; 0 hides nothing."""
    rates: tuple[tuple[str, LinkRate], ...] = ()
    """Measured rates by mesh axis, which replace the nominal ones."""
    host_links: tuple[tuple[float, ...], ...] = ()
    """Bytes per second from each host to each other, in the order of the mesh, which replace the
    nominal ones between hosts; none if they are not known."""

    @property
    def kernel_rates(self) -> KernelRates:
        """What kernels reach, measured on an H100, of the peaks of this device."""
        h100 = CHIPS["h100"]
        return H100_RATES.scale(
            self.flops / h100.flops, self.memory_bandwidth / h100.memory_bandwidth
        )

    @property
    def available(self) -> int:
        """Bytes available to a program."""
        return self.memory - self.reserved

    def hops(self, num_devices: int) -> float:
        """Return the messages in sequence that pass one value along all devices of a group.

        Args:
            num_devices: Devices of the group: one after the other in a ring, or side by side of
                the smallest torus that holds them.
        """
        if self.torus and num_devices >= 2 ** (self.torus + 1):
            return self.torus * (num_devices ** (1 / self.torus) - 1)
        return num_devices - 1

    def measured_rate(self, axes: Sequence[str]) -> LinkRate | None:
        """Return the slowest measured rate of some axes; None if one was not measured.

        Args:
            axes: Mesh axes.
        """
        rates = [rate for axis, rate in self.rates if axis in axes]
        return slowest(rates) if rates and len(rates) == len(axes) else None

    def bandwidth(self, reach: int) -> float:
        """Return the bytes per second that a device sends within a group.

        Args:
            reach: Devices from the first to the last of the group, in the order of the machine.
        """
        if reach <= self.package and self.package_bandwidth:
            return self.package_bandwidth
        return self.far_bandwidth if self.domain and reach > self.domain else self.link_bandwidth


def _tpu(
    memory: float,
    flops: float,
    bandwidth: float,
    link: float,
    torus: int,
    watts: tuple[float, float],
) -> Chip:
    """Return a TPU from GiB, FLOP/s, bytes/s of memory and of one link in one direction, and watts
    when idle and at most."""
    return Chip(
        platform="tpu",
        memory=int(memory * GIB),
        reserved=GIB // 4,
        flops=flops,
        memory_bandwidth=bandwidth,
        link_bandwidth=2 * link,
        far_bandwidth=2 * link,
        torus=torus,
        idle_watts=watts[0],
        peak_watts=watts[1],
    )


def _gpu(
    memory: float,
    flops: float,
    bandwidth: float,
    link: float,
    watts: tuple[float, float],
    far: float = 50e9,
) -> Chip:
    """Return a GPU, eight to a host, from bytes, FLOP/s, bytes/s of memory and links, watts when
    idle and at most, and bytes/s of a card."""
    return Chip(
        platform="gpu",
        memory=int(memory),
        reserved=int(memory * 0.08),
        flops=flops,
        memory_bandwidth=bandwidth,
        link_bandwidth=link,
        far_bandwidth=far,
        link_latency=5e-6,
        domain=8,
        idle_watts=watts[0],
        peak_watts=watts[1],
    )


CHIPS: dict[str, Chip] = {
    # Inter-chip bandwidth of a chip, both directions: v4 and v5p 6 links, v5e and v6e 4.
    "v4": _tpu(32, 275e12, 1.2e12, 45e9, 3, (90, 192)),
    "v5e": _tpu(16, 197e12, 0.82e12, 45e9, 2, (50, 200)),
    "v5p": _tpu(95, 459e12, 2.765e12, 90e9, 3, (80, 450)),
    "v6e": _tpu(32, 918e12, 1.64e12, 90e9, 2, (60, 350)),
    # One chip is two devices to JAX: half of 192 GiB, 2307 TFLOP/s and 7.37 TB/s each.
    "tpu7x": _tpu(96, 1153e12, 3.69e12, 90e9, 3, (80, 500)),
    "a100": _gpu(80e9, 312e12, 2.04e12, 300e9, (55, 400), 25e9),
    "h100": _gpu(80e9, 989.5e12, 3.35e12, 450e9, (75, 700)),
    "h200": _gpu(141e9, 989.5e12, 4.8e12, 450e9, (80, 700)),
    "b200": _gpu(180e9, 2250e12, 8.0e12, 900e9, (140, 1000)),
    # One die of two: 64 GiB and half of 383 TFLOP/s each; a host has four pairs.
    "mi250x": dataclasses.replace(
        _gpu(64 * GIB, 191.5e12, 1.6e12, 50e9, (45, 280), 25e9),
        package=2,
        package_bandwidth=200e9,
    ),
    # Seven links of 64 GB/s, one to each other GPU of a host: all in use over a whole host only.
    "mi300x": _gpu(192e9, 1307.4e12, 5.3e12, 448e9, (140, 750)),
    # One of several fake devices of a small machine: only ratios are meaningful.
    "cpu": Chip(
        platform="cpu",
        memory=4 * GIB,
        reserved=0,
        flops=10e9,
        memory_bandwidth=5e9,
        link_bandwidth=1e9,
        far_bandwidth=1e9,
        link_latency=5e-5,
        idle_watts=2.0,
        peak_watts=10.0,
    ),
}
"""Devices by the name in a topology."""

KNOWN = (
    "tpu:v4:4x4x4, tpu:v5e:16x16, tpu:v5p:4x4x4, tpu:v6e:16x16, tpu:tpu7x:2x2x2,"
    " gpu:h100:8 (a100, h200, b200, mi250x, mi300x), cpu:8"
)
"""Examples of topologies, for messages."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Devices that need not be attached."""

    text: str
    """Text from the user."""
    kind: str
    """Row of CHIPS."""
    shape: tuple[int, ...]
    """Devices along each dimension of the torus; one number for other platforms."""
    measured: Chip | None = None
    """Properties of one device, where they were measured."""

    @property
    def chip(self) -> Chip:
        """Properties of one device."""
        return self.measured or CHIPS[self.kind]

    @property
    def num_devices(self) -> int:
        """Number of devices as JAX counts them."""
        return math.prod(self.shape) * (2 if self.kind == "tpu7x" else 1)

    @property
    def compiler_name(self) -> str:
        """Name for the TPU compiler, such as `v5e:16x16`."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What the TPU compiler must know beside the name, as an attached pod would say it.

        `wrap`: links close a dimension to a ring; cubes of 4 are joined so in three dimensions, a
        side of 16 in two. Without them the compiler gathers over a whole 3D torus by all-reduces,
        which send twice the bytes. `chip_config_name`: two cores of a v4 or v5p are one device.
        """
        if len(self.shape) == 3:
            wrap = (all(size % 4 == 0 for size in self.shape),) * 3
        else:
            wrap = (*(size == 16 for size in self.shape), False)
        has_megacore = self.kind in ("v4", "v5p")
        return {"wrap": wrap} | ({"chip_config_name": "megacore"} if has_megacore else {})


def _example(kind: str) -> str:
    """Return a kind with a usual size."""
    return f"{kind}:{ {0: '8', 2: '16x16', 3: '4x4x4'}[CHIPS[kind].torus] }"


def parse_topology(text: str) -> Topology:
    """Return the topology of a text.

    Args:
        text: Platform, kind and size, such as `tpu:v5e:16x16`, `gpu:h100:8`, `cpu:8`.

    Raises:
        ValueError: The text is not a known topology; names the nearest one.
    """
    platform, _, size_text = text.partition(":")
    kind, _, size = size_text.partition(":") if platform != "cpu" else ("cpu", "", size_text)
    names = [name for name, chip in CHIPS.items() if chip.platform == platform]
    if not names:
        raise ValueError(
            f"topology={text!r}: {platform!r} is not a platform"
            f"{closest(platform, ('tpu', 'gpu', 'cpu'))}; known are {KNOWN}"
        )
    if kind not in names:
        near = closest(kind, [name for name in names if name[:2] == kind[:2]])
        raise ValueError(
            f"topology={text!r}: there is no {platform.upper()} {kind!r}{near}; known are"
            f" {', '.join(names)}, such as {platform}:{_example(names[1])}"
        )
    num_dims = CHIPS[kind].torus or 1
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size) or size.count("x") + 1 != num_dims:
        fault = f"has the size {size!r}" if size else "has no size"
        raise ValueError(
            f"topology={text!r} {fault}: give {num_dims} whole"
            f" number{'s joined by x' if num_dims > 1 else ''}, such as"
            f" {f'{platform}:' if kind != platform else ''}{_example(kind)}"
        )
    shape = tuple(map(int, size.split("x")))
    if CHIPS[kind].domain and math.prod(shape) > 8 and math.prod(shape) % 8:
        raise ValueError(
            f"topology={text!r}: {shape[0]} GPUs do not fill hosts of 8: choose up to 8, or a"
            " multiple of 8"
        )
    return Topology(text=text, kind=kind, shape=shape)
