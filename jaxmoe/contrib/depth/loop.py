# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Calls a block of layers several times with the same parameters (looped transformer, Hyperloop).

    x = layers before;  `times` times: x = block(x);  layers after

With a `connection` (Hyperloop, arXiv 2604.21254), turn t reads from n streams X [n D] and writes to
them by weights of its own; the streams begin as copies and end as their mean:

    x_t = pre_t X + p_t
    X   = diag(res_t) X + post_t (block(x_t) - x_t)^T

with `pre`, `post` and `res` of `hyper_connections.py` (mixing "diagonal") and p_t the learned
embedding of the turn, initially 0. The source does not say whether the branch is what the block
returns or what it adds: here what it adds, so that a new model is close to the plain loop.

Statistics of routers are summed over turns. Caches have an entry for each turn. Without a
connection the number of parameters does not depend on `times`; with one, each turn adds
n D 3 n + 3 n + 3 + D.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array, Float

from jaxmoe.contrib.depth.hyper_connections import (
    HyperConnection,
    check_streams,
    connection_flops,
    mean_stream,
    read_streams,
    spread,
    write_streams,
)
from jaxmoe.declarations import Declaration, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.records import Stream
from jaxmoe.models.loop import CallBlock, LayerLoop
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
class LoopConfig(LayerLoop):
    """Consecutive layers that are called several times."""

    name: ClassVar[str] = "loop"

    first: int = 0
    """Number of the first layer of the block."""
    last: int | None = None
    """Number of the last layer of the block; that of the model when None."""
    times: int = 2
    """Turns: calls of the block."""
    connection: HyperloopConfig | None = None
    """Hyper-connection around the turns; None passes the stream from turn to turn."""

    def __post_init__(self):
        if self.first < 0:
            raise ValueError(f"model.loop.first={self.first} must be at least 0")
        if self.last is not None and self.last < self.first:
            raise ValueError(
                f"model.loop.last={self.last} must be at least model.loop.first={self.first}"
            )
        if self.times < 1:
            raise ValueError(f"model.loop.times={self.times} must be at least 1")

    @property
    def has_modules(self) -> bool:
        """Whether there is a connection."""
        return self.connection is not None

    def layers(self, num_layers: int) -> range:
        """Return the numbers of the layers of the block."""
        return range(self.first, num_layers if self.last is None else self.last + 1)

    def check(self, num_layers: int) -> None:
        """Refuse layers that do not exist."""
        for field in ("first", "last"):
            number = getattr(self, field)
            if number is not None and number >= num_layers:
                raise ValueError(
                    f"model.loop.{field}={number} must be at most {num_layers - 1}, the number of"
                    " the last layer"
                )

    def flops_per_token(self, embed_dim: int) -> float:
        """Return the FLOPs of the connections beyond the parameters', forward and backward."""
        if self.connection is None:
            return 0.0
        return self.times * connection_flops(self.connection.streams, embed_dim, "diagonal")

    def run(
        self, call: CallBlock, flow: Any, context: LayerContext, execution: ExecutionConfig
    ) -> Any:
        """Return the flow after all turns, with a connection around each if there is one."""
        if self.connection is None:
            return LayerLoop.run(self, call, flow, context, execution)
        sizes = (self.connection.streams, "diagonal", context.embed_dim, context.norm_epsilon)
        connections = [
            LoopConnection(*sizes, execution.placement, name=f"loop_{turn}")
            for turn in range(self.times)
        ]
        streams = [spread(stream.x, self.connection.streams) for stream in _streams(flow)]
        for turn, connection in enumerate(connections):
            read = [connection.read(x) for x in streams]
            before = tuple(
                _with_x(stream, x) for stream, (x, _) in zip(_streams(flow), read, strict=True)
            )
            flow = call(before if isinstance(flow, tuple) else before[0], turn)
            streams = [
                write_streams(x, stream.x - old, *maps)
                for x, stream, (old, maps) in zip(streams, _streams(flow), read, strict=True)
            ]
        after = tuple(
            _with_x(stream, mean_stream(x))
            for stream, x in zip(_streams(flow), streams, strict=True)
        )
        return after if isinstance(flow, tuple) else after[0]


class LoopConnection(HyperConnection):
    """Weights with which one turn reads the streams and writes to them, and its embedding."""

    def setup(self):
        """Declare the parameters."""
        self.declare_maps()
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


def _streams(flow: Any) -> tuple[Stream, ...]:
    """Return the streams of a flow: one, or those of two halves of the rows."""
    return flow if isinstance(flow, tuple) else (flow,)


def _with_x(stream: Stream, x: Array) -> Stream:
    return dataclasses.replace(stream, x=x)
