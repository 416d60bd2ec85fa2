# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the scans of a model in order; the base class of what calls some of them several times.

The layers of a loop have scans of their own, which `Scan.turns` and `Scan.is_looped` mark.
Statistics of routers are summed over turns, and caches have an entry for each.

To add a loop: a config that extends `LayerLoop`, and its row under `loop` in
`jaxmoe/catalog/layers.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.records import LayerOutputs
from jaxmoe.models.stacks import Scan

CallBlock = Callable[[Any, int], Any]
"""(flow, turn) -> flow after one turn of the block; a flow is what `RowTransform.enter` returns."""


class LayerLoop(abc.ABC):
    """Base class of the configs that call consecutive layers several times."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""
    times: int
    """Turns: calls of the block."""

    @property
    def has_modules(self) -> bool:
        """Whether parameters of its own, and arrays of a whole turn, lie around the block."""
        return False

    @abc.abstractmethod
    def layers(self, num_layers: int) -> range:
        """Return the numbers of the layers of the block.

        Args:
            num_layers: Layers of the model.
        """

    @abc.abstractmethod
    def check(self, num_layers: int) -> None:
        """Refuse a loop that a model cannot have.

        Args:
            num_layers: Layers of the model.

        Raises:
            ValueError: A layer does not exist.
        """

    def flops_per_token(self, embed_dim: int) -> float:
        """Return the FLOPs around the turns beyond the parameters', forward and backward.

        Args:
            embed_dim: D.
        """
        del embed_dim
        return 0.0

    def run(
        self, call: CallBlock, flow: Any, context: LayerContext, execution: ExecutionConfig
    ) -> Any:
        """Return the flow after all turns.

        It is called in the module that owns the parameters of the model, and may declare some.

        Args:
            call: Computes a turn.
            flow: Flow before the block.
            context: Model-wide numbers.
            execution: How the layers are computed.
        """
        del context, execution
        for turn in range(self.times):
            flow = call(flow, turn)
        return flow


CallScan = Callable[[Scan, Any, int], tuple[Any, Any]]
"""(scan, flow, turn) -> (flow, outputs)."""


def run_scans(
    scans: Sequence[Scan],
    call: CallScan,
    flow: Any,
    loop: LayerLoop | None,
    context: LayerContext,
    execution: ExecutionConfig,
) -> tuple[Any, list[Any]]:
    """Return the flow after all layers, and the outputs of each scan summed over its turns.

    Args:
        scans: Scans of the model, in order.
        call: Computes a scan.
        flow: Flow before the first layer.
        loop: Loop of the model; None if it has none.
        context: Model-wide numbers.
        execution: How the layers are computed.
    """
    outputs: dict[str, Any] = {}
    for is_looped, members in itertools.groupby(scans, key=lambda scan: scan.is_looped):
        block = tuple(members)

        def call_block(flow: Any, turn: int, block: Sequence[Scan] = block) -> Any:
            for scan in block:
                flow, output = call(scan, flow, turn)
                outputs[scan.name] = _sum_up(outputs.get(scan.name), output)
            return flow

        if is_looped and loop is not None:
            flow = loop.run(call_block, flow, context, execution)
        else:
            flow = call_block(flow, 0)
    return flow, list(outputs.values())


def _sum_up(before: Any, output: Any) -> Any:
    """Return the outputs of a scan with those of its earlier turns."""
    if before is None:
        return output
    if isinstance(output, dict):  # by place in a period
        return {place: _sum_up(before[place], record) for place, record in output.items()}
    return LayerOutputs(
        statistics=_sum(before.statistics, output.statistics),
        losses=output.losses,  # of weights: the same in every turn; of gates: of the last one
        observations=_sum(before.observations, output.observations),
    )


def _sum(before: Any, output: Any) -> Any:
    return output if before is None else before + output
