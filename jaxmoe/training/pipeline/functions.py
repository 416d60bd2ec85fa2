# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`PipelinedModel`: the functions of a model that a pipeline executes, in a region over `stage`."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.gather import WHOLE, use_copies
from jaxmoe.layers.records import Stream, TokenInputs
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.stacks import Scan
from jaxmoe.models.transformer import first_stream
from jaxmoe.training import Objective
from jaxmoe.training.pipeline.head import HeadLoss, HeadTokens, PipelineHead, head_loss
from jaxmoe.training.pipeline.stages import Layers, LayerSums, ModelParts, cut_scan
from sharding import axes as ax
from sharding.pipeline.executor import Number, PipelineParts, PipelineSums
from sharding.regions import sum_over


@typing.no_type_check
@struct.dataclass
class MicroBatches:
    """Arrays of the tokens of all micro-batches, [m B S ...], in the order of the stream."""

    about: TokenInputs
    head: HeadTokens


@typing.no_type_check
@struct.dataclass
class EndSums:
    """Sums over micro-batches of what is computed before the stages, or after them."""

    layers: dict[str, LayerSums]
    """Sums of the scans there, by name."""
    gradients: Any
    """Gradients of the parameters there; None without backward."""
    head: HeadLoss | None = None
    """Loss; None before the stages."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PipelinedModel:
    """A model in a pipeline, on the arrays of one stage."""

    model: ModelConfig
    execution: ExecutionConfig
    objective: Objective
    params: Any
    """Parameters; those of the staged scan are [chunks, layers of a group ...]."""
    gathered: Any
    """Parameters gathered once a step, in the same form; or None."""
    rows: MicroBatches
    layers: Layers
    """Layers of the staged scan."""
    scale: Float[Array, ""]
    """Factor on the gradient of the summed loss."""
    has_backward: bool

    @property
    def parts(self) -> ModelParts:
        """The model in three parts."""
        return ModelParts.of(self.model)

    def functions(self) -> PipelineParts:
        """Return the functions for the executor."""
        return PipelineParts(
            enter=self.enter,
            forward=self.forward,
            backward=self.backward,
            leave=self.leave,
            home=self.home,
        )

    @property
    def staged_variables(self) -> dict[str, Any]:
        """Variables of the staged scan: parameters, and gathered ones beside them."""
        name = self.parts.staged.name
        variables = {"params": self.params[name]}
        return variables if self.gathered is None else variables | {WHOLE: self.gathered[name]}

    def enter(self, micro: Number) -> tuple[Stream, EndSums]:
        """Return the stream before the stages, equal on all of them, and sums of its layers."""
        inputs = self._about(micro)
        scans = self.parts.before
        addend = self._embed(self._of(("embedding",)), inputs)
        stream = self._enter(self._sum_up(addend), inputs)
        params = self._of(scan.name for scan in scans)
        stream, sums = self._run(scans, params, stream, inputs, None)
        return stream, EndSums(layers=sums, gradients=None)

    def home(self, gradient: Stream, micro: Number, past: EndSums | None) -> EndSums:
        """Return the gradients of embedding and layers before the stages, and their sums."""
        inputs = self._about(micro)
        scans = self.parts.before
        embedding = self._of(("embedding",))
        layers = self._of(scan.name for scan in scans)
        addend, pull_embedding = jax.vjp(lambda params: self._embed(params, inputs), embedding)

        def run(params: dict[str, Any], stream: Stream) -> Any:
            return _with_loss(self._run(scans, params, stream, inputs, past))

        entered = partial(self._enter, inputs=inputs)
        first, pull_begin = jax.vjp(entered, self._sum_up(addend))
        (_, total), pull_back, sums = jax.vjp(run, layers, first, has_aux=True)
        of_layers, gradient = pull_back((gradient, jnp.ones_like(total)))
        (of_embedding,) = pull_embedding(*pull_begin(gradient))
        return EndSums(layers=jax.lax.stop_gradient(sums), gradients=of_layers | of_embedding)

    def forward(
        self, params: Any, stream: Stream, micro: Number, chunk: Number
    ) -> tuple[Stream, LayerSums]:
        """Return the stream after one group of layers, and its sums."""
        return self.layers(params, stream, self._about(micro), self._first(chunk), None)

    def backward(
        self,
        params: Any,
        stream: Stream,
        micro: Number,
        chunk: Number,
        past: LayerSums,
        gradient: Stream,
        has_work: Bool[Array, ""],
    ) -> tuple[Any, Stream, LayerSums]:
        """Return the gradients of one group of layers and of its input, and its sums."""
        inputs = self._about(micro)
        first = self._first(chunk)

        def run(trained: Any, stream: Stream) -> Any:
            variables = params | {"params": trained}
            return _with_loss(self.layers(variables, stream, inputs, first, past))

        (_, total), pull_back, sums = jax.vjp(run, params["params"], stream, has_aux=True)
        d_params, d_stream = pull_back((gradient, has_work.astype(total.dtype)))
        return d_params, d_stream, jax.lax.stop_gradient(sums)

    def leave(
        self, stream: Stream, micro: Number, past: EndSums | None
    ) -> tuple[EndSums, Stream | None]:
        """Return the loss of a micro-batch with gradients, and the gradient of the stream."""
        scans = self.parts.after
        inputs = self._about(micro)

        def run(params: dict[str, Any], stream: Stream) -> Any:
            stream, sums = self._run(scans, params, stream, inputs, past)
            stream = self.model.residual.leave(stream, self.model.context, self.execution)
            return _with_loss((stream, sums))

        params = self._of(scan.name for scan in scans)
        (last, total), pull_back, sums = jax.vjp(run, params, stream, has_aux=True)
        matrix = "embedding" if self.model.has_tied_embeddings else "head"
        tokens = jax.tree.map(lambda x: _at(x, micro), self.rows.head)
        head = PipelineHead(
            model=self.model,
            execution=self.execution,
            objective=self.objective,
            has_gradient=self.has_backward,
            used=self._use,
        )
        loss, d_x = head_loss(head, last.x, self._of(("final_norm", matrix)), tokens, self.scale)
        sums = EndSums(layers=jax.lax.stop_gradient(sums), gradients=None, head=loss)
        if not self.has_backward:
            return sums, None
        gradient = replace(jax.tree.map(jnp.zeros_like, last), x=d_x)
        d_params, d_stream = pull_back((gradient, jnp.ones_like(total)))
        return replace(sums, gradients=d_params), d_stream

    def totals(self, sums: PipelineSums) -> PipelineSums:
        """Return the sums with those addends summed that differ between stages."""
        stages = replace(sums.stages, losses=sum_over(ax.STAGE, sums.stages.losses))
        results = sums.left
        if self.has_backward:
            gradients = dict(results.head.gradients)
            gradients["final_norm"] = sum_over(ax.STAGE, gradients["final_norm"])
            results = replace(results, head=replace(results.head, gradients=gradients))
        return replace(sums, stages=stages, left=results)

    def _first(self, chunk: Number) -> Any:
        """Return the number of the first iteration of a group of this stage."""
        stages = self.execution.mesh.stage
        return (chunk * stages + jax.lax.axis_index(ax.STAGE)) * self.layers.scan.length

    def _about(self, micro: Number) -> TokenInputs:
        """Return the arrays of the tokens of a micro-batch, laid out as the stream."""
        placement = self.execution.placement

        def place(rows: Array) -> Array:
            return placement.place(_at(rows, micro), (ax.ACT_BATCH, ax.ACT_SEQ))

        return jax.tree.map(place, self.rows.about)

    def _of(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.params[name] for name in names}

    def _use(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return parameters as products read them: gathered, with gradients of the cut ones."""
        if self.gathered is None:
            return params
        return use_copies(params, {name: self.gathered[name] for name in params})

    def _embed(self, params: dict[str, Any], inputs: TokenInputs) -> Stream:
        """Return this stage's addend of the stream before the first layer."""
        table = self._use({"embedding": params["embedding"]})["embedding"]["weight"]
        first_id = jax.lax.axis_index(ax.STAGE) * table.shape[0]
        ids = inputs.context["tokens"] - first_id.astype(jnp.int32)
        return first_stream(self.model, table, ids, self.execution)

    def _enter(self, stream: Stream, inputs: TokenInputs) -> Stream:
        """Return the stream as the layers take it."""
        model = self.model
        return model.residual.enter(stream, inputs, model.context, self.execution)[0]

    @staticmethod
    def _sum_up(stream: Stream) -> Stream:
        return replace(stream, x=sum_over(ax.STAGE, stream.x))

    def _run(
        self,
        scans: tuple[Scan, ...],
        params: dict[str, Any],
        stream: Stream,
        inputs: TokenInputs,
        past: EndSums | None,
    ) -> tuple[Stream, dict[str, LayerSums]]:
        """Return the stream after whole scans, which all stages compute alike."""
        sums = {}
        for scan in scans:
            variables = {"params": params[scan.name]}
            if self.gathered is not None:
                variables[WHOLE] = self.gathered[scan.name]
            layers = dataclasses.replace(self.layers, scan=scan)
            before = None if past is None else past.layers[scan.name]
            stream, sums[scan.name] = layers(variables, stream, inputs, 0, before)
        return stream, sums


def staged_scan(model: ModelConfig, execution: ExecutionConfig) -> Scan:
    """Return the layers of one group of the staged scan."""
    groups = execution.mesh.stage * execution.pipeline_order.chunks
    return cut_scan(ModelParts.of(model).staged, groups)


def _with_loss(result: tuple[Stream, Any]) -> tuple[tuple[Stream, Array], Any]:
    """Return (stream, sum of the losses) to differentiate, and the sums aside."""
    stream, sums = result
    records = sums.values() if isinstance(sums, dict) else (sums,)
    losses = [loss for record in records for loss in record.losses.values()]
    return (stream, sum(losses, jnp.zeros((), jnp.float32))), sums


def _at(rows: Array, micro: Number) -> Array:
    """Return the rows of one micro-batch; of the first for -1."""
    return jax.lax.dynamic_index_in_dim(rows, jnp.maximum(micro, 0), 0, keepdims=False)
