# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Calls a block of layers several times with the same parameters (looped transformer, Hyperloop).

    x = layers before;  `times` times: x = block(x);  layers after

With a `connection` (Hyperloop, arXiv 2604.21254), turn t reads from n streams X [n D] and writes to
them by weights of its own; the streams begin as copies and end as their mean:

    x_t = pre_t X + p_t
    X   = diag(res_t) X + post_t (block(x_t) - x_t)^T

with `pre`, `post` and `res` of `jaxmoe.layers.hyper_connections` (mixing "diagonal") and p_t the
learned embedding of the turn, initially 0. The source does not say whether the branch is what the
block returns or what it adds: here what it adds, so that a new model is close to the plain loop.

Statistics of routers are summed over turns. Caches have an entry for each turn. Without a
connection the number of parameters does not depend on `times`; with one, each turn adds
n D 3 n + 3 n + 3 + D.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.hyper_connections import (
    HyperConnection,
    check_streams,
    connection_flops,
    mean_stream,
    read_streams,
    spread,
    write_streams,
)
from jaxmoe.layers.records import LayerOutputs, Stream
from jaxmoe.models.stacks import Scan
from sharding import axes as ax


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HyperloopConfig:
    """Hyper-connection around every turn of a loop."""

    streams: int = 4
    """Residual streams around the block (n)."""

    def __post_init__(self):
        check_streams("model.loop.connection.streams", self.streams, "diagonal")


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """Consecutive layers that are called several times."""

    first: int = 0
    """Number of the first layer of the block."""
    last: int | None = None
    """Number of the last layer of the block; that of the model when None."""
    times: int = 2
    """Turns: calls of the block."""
    connection: HyperloopConfig | None = None
    """Hyper-connection around the turns; None passes the stream from turn to turn."""

    def __post_init__(self):
        if self.first < 0 or (self.last is not None and self.last < self.first):
            raise ValueError(
                f"model.loop.first={self.first} and model.loop.last={self.last} must name layers"
                " from 0 on, the first not after the last"
            )
        if self.times < 1:
            raise ValueError(f"model.loop.times={self.times} must be at least 1")

    def layers(self, num_layers: int) -> range:
        """Return the numbers of the layers of the block.

        Args:
            num_layers: Layers of the model.
        """
        return range(self.first, num_layers if self.last is None else self.last + 1)

    def check(self, num_layers: int, arrays: int) -> None:
        """Refuse a loop that a model cannot have.

        Args:
            num_layers: Layers of the model.
            arrays: Arrays that its residual passes from layer to layer.

        Raises:
            ValueError: A layer does not exist, or the residual has several arrays as well.
        """
        layers = self.layers(num_layers)
        if not layers or layers[-1] >= num_layers:
            raise ValueError(
                f"model.loop.first={self.first} and model.loop.last={self.last}: layers are"
                f" numbered 0 to {num_layers - 1}"
            )
        if self.connection is not None and arrays > 1:
            raise ValueError(
                f"model.loop.connection has streams of its own, and model.residual passes {arrays}"
                " arrays from layer to layer: take the standard residual, or leave the connection"
                " out"
            )

    def flops_per_token(self, embed_dim: int) -> float:
        """Return the FLOPs of the connections beyond the parameters', forward and backward.

        Args:
            embed_dim: D.
        """
        if self.connection is None:
            return 0.0
        return self.times * connection_flops(self.connection.streams, embed_dim, "diagonal")


def loop_modules(
    loop: LoopConfig | None, context: LayerContext, execution: ExecutionConfig
) -> tuple[LoopConnection, ...]:
    """Return the module of every turn; none without a connection.

    Args:
        loop: Loop of the model, if it has one.
        context: Width, and the term added to the mean square of the streams.
        execution: How it is computed.
    """
    if loop is None or loop.connection is None:
        return ()
    sizes = (loop.connection.streams, "diagonal", context.embed_dim, context.norm_epsilon)
    return tuple(
        LoopConnection(*sizes, execution.placement, name=f"loop_{turn}")
        for turn in range(loop.times)
    )


class LoopConnection(HyperConnection):
    """Weights with which one turn reads the streams and writes to them, and its embedding."""

    def setup(self):
        """Declare the parameters."""
        super().setup()
        embedding = Declaration(
            shape=(self.embed_dim,),
            axes=(ax.NORM,),
            role="connection_bias",
            matrix=None,
            init="zeros",
        )
        self._position = declare(self, "position", embedding)

    def read(
        self, streams: Float[Array, "B S n D"]
    ) -> tuple[Float[Array, "B S D"], tuple[Array, Array]]:
        """Return the input of the turn, and what `write_streams` needs: `post` and `res`."""
        pre, post, res = self.maps(streams)
        position = self.placement.place(self._position, (None,)).astype(streams.dtype)
        return read_streams(streams, pre) + position[None, None], (post, res)


Call = Callable[[Scan, Any, int], tuple[Any, Any]]
"""(scan, flow, turn) -> (flow, outputs); a flow is a stream, or those of two halves of the rows."""


def run_scans(
    scans: Sequence[Scan], call: Call, flow: Any, connections: Sequence[LoopConnection]
) -> tuple[Any, list[Any]]:
    """Return the flow after all layers, and the outputs of each scan summed over its turns.

    Args:
        scans: Scans of the model, in order.
        call: Computes a scan.
        flow: Flow before the first layer.
        connections: Module of every turn of the loop; empty without a connection.
    """
    outputs: dict[str, Any] = {}

    def once(block: Sequence[Scan], flow: Any, turn: int) -> Any:
        for scan in block:
            flow, output = call(scan, flow, turn)
            outputs[scan.name] = _summed(outputs.get(scan.name), output)
        return flow

    for is_looped, members in itertools.groupby(scans, key=lambda scan: scan.is_looped):
        block = tuple(members)
        if is_looped and connections:
            flow = _connected(once, block, flow, connections)
            continue
        for turn in range(block[0].turns):
            flow = once(block, flow, turn)
    return flow, list(outputs.values())


def _connected(
    once: Callable[[Sequence[Scan], Any, int], Any],
    block: Sequence[Scan],
    flow: Any,
    connections: Sequence[LoopConnection],
) -> Any:
    """Return the flow after all turns of a block, with a connection around each."""
    is_halved = isinstance(flow, tuple)
    halves = flow if is_halved else (flow,)
    streams = [spread(half.x, connections[0].streams) for half in halves]
    for turn, connection in enumerate(connections):
        read = [connection.read(x) for x in streams]
        inputs = tuple(_with_x(half, x) for half, (x, _) in zip(halves, read, strict=True))
        after = once(block, inputs if is_halved else inputs[0], turn)
        halves = after if is_halved else (after,)
        streams = [
            write_streams(x, new.x - old, *maps)
            for x, new, (old, maps) in zip(streams, halves, read, strict=True)
        ]
    merged = tuple(_with_x(half, mean_stream(x)) for half, x in zip(halves, streams, strict=True))
    return merged if is_halved else merged[0]


def _with_x(stream: Stream, x: Array) -> Stream:
    return dataclasses.replace(stream, x=x)


def _summed(before: Any, output: Any) -> Any:
    """Return the outputs of a scan with those of its earlier turns."""
    if before is None:
        return output
    if isinstance(output, dict):  # by place in a period
        return {place: _summed(before[place], addend) for place, addend in output.items()}
    return LayerOutputs(
        statistics=_sum(before.statistics, output.statistics),
        losses=output.losses,  # of weights: the same in every turn; of gates: of the last one
        indicators=_sum(before.indicators, output.indicators),
    )


def _sum(x: Any, y: Any) -> Any:
    return y if x is None else x + y
