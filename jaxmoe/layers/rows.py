# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the socket `RowTransform`: another arrangement of the rows for all layers of a model.

    stream, tokens = rows.enter(stream, tokens, ...)      after the embedding
    every layer computes rows.layer(Block, scan) on them
    stream = rows.leave(stream, ...)                      after the last layer, before the norm

A mixer is one (n rows for each sequence), and so is a residual (n streams in place of one). An
execution may bring one (`execution.halves`), and the gradients of a step (`Gradients.paths`: layers
that the rows of a micro-batch do not pass through). They nest: what enters last leaves first.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from flax import linen as nn

from jaxmoe.catalog import choice
from jaxmoe.execution import ExecutionConfig

if TYPE_CHECKING:
    from jaxmoe.layers.context import LayerContext


class RowTransform:
    """Base class of what rearranges the rows around all layers; this one changes nothing."""

    __slots__ = ()

    rearranges_rows: ClassVar[bool] = False
    """Whether layers compute other rows than the sequences."""

    @property
    def rows_per_sequence(self) -> int:
        """Rows that the layers compute for each sequence."""
        return 1

    def enter(
        self,
        stream: Any,
        tokens: Any,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        has_cache: bool = False,
    ) -> tuple[Any, Any]:
        """Return the stream before the first layer and the inputs of all layers, rearranged.

        Args:
            stream: `Stream` before the first layer, as other transforms return it.
            tokens: `TokenInputs` of all layers, as other transforms return them.
            context: Model-wide numbers.
            execution: How the layers are computed, on the current mesh.
            has_cache: Whether caches of earlier tokens are given.

        Raises:
            ValueError: The model, the rows or the mesh do not allow it.
        """
        del context, execution, has_cache
        return stream, tokens

    def layer(self, block: type[nn.Module], scan: str) -> type[nn.Module]:
        """Return the module class of a layer that takes what `enter` returns.

        Args:
            block: Class of a layer that takes what `enter` received.
            scan: Name of the scan of the layer.
        """
        del scan
        return block

    def leave(self, stream: Any, context: LayerContext, execution: ExecutionConfig) -> Any:
        """Return the stream of all sequences after the last layer.

        It is called in the module that owns the parameters of the model, and may declare some.

        Args:
            stream: What the last layer returned.
            context: Model-wide numbers.
            execution: How the layers are computed, on the current mesh.
        """
        del context, execution
        return stream


@dataclasses.dataclass(frozen=True, slots=True)
class NestedRows(RowTransform):
    """Several transforms, of which the last to enter is the first to leave."""

    transforms: tuple[RowTransform, ...]

    def enter(
        self,
        stream: Any,
        tokens: Any,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        has_cache: bool = False,
    ) -> tuple[Any, Any]:
        """Enter all, the first one first."""
        for rows in self.transforms:
            stream, tokens = rows.enter(stream, tokens, context, execution, has_cache=has_cache)
        return stream, tokens

    def layer(self, block: type[nn.Module], scan: str) -> type[nn.Module]:
        """Return the class that the last one makes of those of the others."""
        for rows in self.transforms:
            block = rows.layer(block, scan)
        return block

    def leave(self, stream: Any, context: LayerContext, execution: ExecutionConfig) -> Any:
        """Leave all, the last one first."""
        for rows in reversed(self.transforms):
            stream = rows.leave(stream, context, execution)
        return stream


class ExecutionRows(RowTransform):
    """Base class of the configs of arrangements that an execution asks for."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry."""


def rows_of(execution: ExecutionConfig) -> ExecutionRows | None:
    """Return the arrangement of the rows that an execution asks for; None: as they are."""
    return None if execution.halves == 1 else choice("rows", "halves")()
