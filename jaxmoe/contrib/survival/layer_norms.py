# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps in the state what a lost pipeline stage is replaced from (CheckFree, arXiv 2506.15461).

    layer_norms   clipped gradient norm of each layer of the longest scan in the last accepted step,
                  by which the neighbours of a lost layer are weighted
    mirror        rows of the vocabulary that the stage before holds, by the paths of `params`;
                  zeros before the first step, and none without stages

`recovery.py` reads both.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array, Float

from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.parts.base import Start, StepPart
from jaxmoe.training.pipeline.stages import ModelParts
from sharding import axes as ax
from sharding.constrain import place_like

if TYPE_CHECKING:
    from jaxmoe.training.state import TrainState
    from jaxmoe.training.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorms(StepPart):
    """Gradient norms of the layers."""

    name: ClassVar[str] = "layer_norms"

    def init(self, start: Start) -> Float[Array, " layers"]:
        """Return zeros, one for each layer of the scan that pipelines cut."""
        (length,) = (scan.length for scan in start.model.scans if scan.axis == ax.LAYERS)
        return jnp.zeros(length)

    def after(self, step: Step, before: TrainState, after: TrainState, grads: Any) -> TrainState:
        """Return the training state with the norms of this step."""
        del before
        layers = jax.tree.leaves(grads[ModelParts.of(step.model).staged.name])
        squares = [
            jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=tuple(range(1, leaf.ndim)))
            for leaf in layers
        ]
        norms = self.own_state(after)
        if not squares:
            return after
        return self.with_state(after, place_like(jnp.sqrt(sum(squares[1:], squares[0])), norms))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyMirror(StepPart):
    """Rows of embedding and head that the stage before holds."""

    name: ClassVar[str] = "mirror"

    def init(self, start: Start) -> Any:
        """Return zeros in place of the rows; None without stages, or where they do not change."""
        model = start.model
        execution = start.execution
        is_whole = model.adapter is not None or execution.precision.weights != "floating"
        if execution.mesh.stage <= 1 or is_whole:
            return None
        flat: dict[str, Any] = dict(traverse_util.flatten_dict(start.params, sep="/"))
        rows = parameter_table(model, rules=execution.axis_rules)
        cut = {row.path: flat[row.path] for row in rows if ax.VOCAB in row.declaration.axes}
        zeros = {path: place_like(jnp.zeros(x.shape, x.dtype), x) for path, x in cut.items()}
        return traverse_util.unflatten_dict(zeros, sep="/")

    def settle(self, step: Step, before: TrainState, after: TrainState) -> TrainState:
        """Return the training state with the rows of its parameters."""
        del step, before
        if self.name not in after.parts:
            return after
        flat: dict[Any, Any] = dict(traverse_util.flatten_dict(after.params))
        paths = traverse_util.flatten_dict(self.own_state(after))
        rows = {path: _from_before(flat[path]) for path in paths}
        return self.with_state(after, traverse_util.unflatten_dict(rows))


def _from_before(x: Array) -> Array:
    spec = jax.typeof(x).sharding.spec
    stages = jax.sharding.get_abstract_mesh().shape[ax.STAGE]
    ring = [(stage, (stage + 1) % stages) for stage in range(stages)]
    send = jax.shard_map(
        lambda local: jax.lax.ppermute(local, ax.STAGE, ring), in_specs=spec, out_specs=spec
    )
    return send(x)
