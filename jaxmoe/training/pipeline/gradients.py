# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the gradients of a step, and the loss of held-out rows, in a pipeline over `stage`.

The result is that of `jaxmoe.training.accumulation.accumulate`: micro-batch i has the rows i,
i + m, ... of the batch; router state, keys, numbers of rows and both forms of the accumulated
balance losses are the same.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.sequences import lay_out
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import check_call, token_inputs
from jaxmoe.routing import RouterStatistics
from jaxmoe.scaling.initialize import lay_out as lay_out_params
from jaxmoe.training import Objective
from jaxmoe.training.accumulation import GradientSums, Rows, split_rows
from jaxmoe.training.balance import takes_two_passes
from jaxmoe.training.estimators.backward import Backward
from jaxmoe.training.loss import batch_context, lay_out_batch
from jaxmoe.training.objective import TokenGiven
from jaxmoe.training.pipeline.functions import EndSums, MicroBatches, PipelinedModel, staged_scan
from jaxmoe.training.pipeline.head import HeadLoss, HeadTokens
from jaxmoe.training.pipeline.stages import Layers, LayerSums, ModelParts, check_stages
from jaxmoe.training.state import TrainState
from pallas_kernels.backend import platform
from sharding import axes as ax
from sharding.constrain import reshape_to
from sharding.pipeline import Paths, forward_schedule
from sharding.pipeline.executor import PipelineSums, execute
from sharding.regions import region

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


def check_compiler(execution: ExecutionConfig) -> None:
    """Refuse a program that the compiler of older versions of JAX does not survive.

    With jax 0.10 and libtpu 0.0.42 a backward pass in two halves that computes layers once more
    ends the process (`spmd_partitioner.cc`, IsManualSubgroup); libtpu 0.0.48 compiles it.

    Raises:
        ValueError: Weight gradients are deferred, with remat, on TPUs, before jax 0.11.
    """
    remats = {execution.remat_of(is_routed) for is_routed in (True, False)}
    if not execution.pipeline_order.is_deferred or remats == {"none"}:
        return
    if platform() == "tpu" and jax.__version_info__ < (0, 11):
        raise ValueError(
            f"jax {jax.__version__} must be at least 0.11 for"
            " execution.pipeline.weight_gradients=deferred with"
            f" execution.remat={execution.remat} on TPUs: install it, or set execution.remat to"
            " none"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineBackward(Backward):
    """All micro-batches in a pipeline over `stage`, by its schedule."""

    name: ClassVar[str] = "pipeline"

    def check(self, step: Step) -> None:
        """Refuse what a pipeline cannot train; see `check_stages`."""
        check_stages(step.model, step.execution, step.accumulation)

    def sums(self, step: Step, state: TrainState, rows: Rows, gathered: Any) -> GradientSums:
        """Return the sums over the micro-batches of one step; see the base class."""
        return _with_adapter_losses(step, _pipeline_sums(step, state, rows, gathered), state.params)


def _pipeline_sums(step: Step, state: TrainState, rows: Rows, gathered: Any) -> GradientSums:
    """Return the sums without losses that no stage computes."""
    model = step.model
    execution = step.execution
    table = step.table
    check_compiler(execution)
    arrays = PipelineArrays(
        params=state.params,
        gathered=gathered,
        rows=_micro_batches(rows.batch, rows.accumulation, model, execution),
        router_state=state.router_state,
        total_weight=rows.total_weight,
        key_data=jax.random.key_data(jax.random.fold_in(state.rng, state.step)),
    )
    run = partial(
        _execute,
        micro_batches=rows.accumulation,
        model=model,
        execution=execution,
        objective=step.objective,
    )
    statistics = None
    if takes_two_passes(model, step.accumulated_balance):
        statistics = _statistics(run(arrays, has_backward=False), model, execution)
    paths = step.gradients.paths(rows.accumulation)
    order = None if paths is None else paths.groups_of
    arrays = dataclasses.replace(arrays, statistics=statistics)
    sums = run(arrays, has_backward=True, paths=order)
    grads = _gradients(sums, model)
    return GradientSums(
        grads=grads if table is None else table.select_trained(grads),
        loss=sums.left.head.loss / rows.total_weight,
        losses=_losses(sums),
        statistics=_statistics(sums, model, execution),
        row_nll=sums.left.head.row_loss if step.reads_row_losses else None,
    )


def _with_adapter_losses(step: Step, summed: GradientSums, params: Any) -> GradientSums:
    """Return the sums of a pipeline with the losses of the adapter, which no stage computes."""
    adapter = step.model.adapter
    table = step.table
    if adapter is None or table is None:
        return summed

    def total(trained: Any) -> tuple[Array, dict[str, Array]]:
        losses = adapter.losses(table.merge(trained, params), step.execution.placement)
        return sum(losses.values(), jnp.zeros(())), losses

    grads, losses = jax.grad(total, has_aux=True)(table.select_trained(params))
    if not losses:
        return summed
    gradients = jax.tree.map(jnp.add, summed.grads, grads)
    return dataclasses.replace(summed, grads=gradients, losses=summed.losses | losses)


def pipeline_forward(
    params: Any,
    router_state: Any,
    batch: Batch,
    *,
    model: ModelConfig,
    execution: ExecutionConfig,
    objective: Objective,
    context: Mapping[str, Array] | None = None,
    micro_batches: int = 1,
) -> tuple[Float[Array, ""], RouterStatistics | None]:
    """Return the summed loss of held-out rows in nats, and their routing statistics.

    Args:
        params: Parameters of the model.
        router_state: State of the routers.
        batch: Rows.
        model: Model to evaluate.
        execution: Mesh with stages.
        objective: What is predicted from what.
        context: Further [B S] arrays for routers, by name.
        micro_batches: Parts of the rows, see `held_out_parts`; their statistics are added.
    """
    arrays = PipelineArrays(
        params=params,
        rows=_micro_batches(batch, micro_batches, model, execution, context),
        router_state=router_state,
        total_weight=jnp.ones((), jnp.float32),
    )
    sums = _execute(
        arrays,
        micro_batches=micro_batches,
        model=model,
        execution=execution,
        objective=objective,
        has_backward=False,
        train=False,
    )
    return sums.left.head.loss, _statistics(sums, model, execution)


def held_out_parts(model: ModelConfig, execution: ExecutionConfig, rows: int) -> int:
    """Return the micro-batches into which held-out rows are cut, at most two per stage.

    Rows stay together where the experts of a token may depend on those of other rows.

    Args:
        model: Model with the routers.
        execution: Mesh with stages.
        rows: Rows of a batch.
    """
    moe = model.moe
    mesh = execution.mesh
    if moe is not None:
        has_limit = moe.capacity is not None and not moe.capacity.traits.is_for_training
        if has_limit or not moe.router.traits.is_causal:
            return 1
    numbers = range(1, 2 * mesh.stage + 1)
    return max(number for number in numbers if rows % (number * mesh.batch_shards) == 0)


def _micro_batches(
    batch: Batch,
    number: int,
    model: ModelConfig,
    execution: ExecutionConfig,
    context: Mapping[str, Array] | None = None,
) -> MicroBatches:
    """Return the arrays of all micro-batches, with the tokens in the order of the stream."""
    context_arrays: dict[str, Any] = {**(context or {}), **batch_context(model, batch)}
    batch, order = lay_out_batch(batch, model, execution)
    context_arrays = lay_out(jax.tree.map(jnp.asarray, context_arrays), order, execution)
    tokens = jnp.asarray(batch.tokens)
    placement = execution.placement
    arrays = {"tokens": tokens, "positions": batch.positions, "segment_ids": batch.segment_ids}
    arrays_by_name = {
        name: jnp.asarray(array) for name, array in arrays.items() if array is not None
    }
    rows = MicroBatches(
        about=token_inputs(arrays_by_name | {"context": context_arrays}, order, placement),
        head=HeadTokens(
            targets=jnp.asarray(batch.targets),
            given=TokenGiven(
                weights=jnp.asarray(batch.loss_weights),
                extra=jax.tree.map(jnp.asarray, batch.extra),
            ),
        ),
    )
    return jax.tree.map(lambda rows: split_rows(rows, number, placement), rows)


@typing.no_type_check
@struct.dataclass
class PipelineArrays:
    """Arrays that enter the region of the stages."""

    params: Any
    """Parameters; inside, those of the staged scan are [chunks, layers of a chunk ...]."""
    rows: MicroBatches
    router_state: Any
    total_weight: Float[Array, ""]
    """Divisor of the summed loss, before its gradient."""
    gathered: Any = None
    """Parameters gathered once a step, or None."""
    statistics: RouterStatistics | None = None
    """Statistics of the first of two passes."""
    key_data: Array | None = None
    """Key of the routers' noise; None without noise."""


def _execute(
    arrays: PipelineArrays,
    *,
    micro_batches: int,
    model: ModelConfig,
    execution: ExecutionConfig,
    objective: Objective,
    has_backward: bool,
    train: bool = True,
    paths: Paths | None = None,
) -> PipelineSums:
    """Execute the pipeline; parameters are cut into chunks outside of the region."""
    check_call(model, arrays.rows.about.context["tokens"][0], execution)
    stages = execution.mesh.stage
    pipeline = execution.pipeline_order
    if has_backward:
        schedule = pipeline.schedule(stages, micro_batches, paths)
    else:
        schedule = forward_schedule(stages, pipeline.chunks, micro_batches)
    scan = staged_scan(model, execution)

    def run(local: PipelineArrays) -> PipelineSums:
        key_data = local.key_data
        pipelined = PipelinedModel(
            model=model,
            execution=execution,
            objective=objective,
            params=local.params,
            gathered=local.gathered,
            rows=local.rows,
            layers=Layers(
                scan=scan,
                model=model,
                execution=execution,
                router_state=local.router_state,
                key=None if key_data is None else jax.random.wrap_key_data(key_data),
                share=1.0 / micro_batches,
                batch_statistics=local.statistics,
                train=train,
            ),
            scale=1.0 / local.total_weight,
            has_backward=has_backward,
        )
        return pipelined.totals(
            execute(schedule, pipelined.functions(), pipelined.staged_variables)
        )

    params = lay_out_params(model, arrays.params, rules=execution.axis_rules)
    chunked = _in_chunks(params, model, execution)
    gathered = arrays.gathered
    if gathered is not None:
        gathered = _gathered_in_chunks(gathered, chunked, model)
    specs = _out_specs(chunked, model, execution, has_backward)
    staged = dataclasses.replace(arrays, params=chunked, gathered=gathered)
    return region(run, axis=ax.STAGE, out_specs=specs)(staged)


def _out_specs(
    params: Any, model: ModelConfig, execution: ExecutionConfig, has_backward: bool
) -> PipelineSums:
    """Return the specs of the sums, as prefixes of their trees."""
    parts = ModelParts.of(model)
    alike: Any = PartitionSpec()
    by_layer: Any = PartitionSpec(None, ax.STAGE)
    by_row: Any = execution.placement.spec((ax.ACT_BATCH,))
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, params)

    def of(*names: str) -> Any:
        return {name: specs[name] for name in names} if has_backward else None

    head = "embedding" if model.has_tied_embeddings else "head"
    loss = HeadLoss(loss=alike, row_loss=by_row, gradients=of("final_norm", head))
    after = of(*(scan.name for scan in parts.after))
    before = of("embedding", *(scan.name for scan in parts.before))
    return PipelineSums(
        stages=LayerSums(statistics=by_layer, losses=alike),
        gradients=specs[parts.staged.name] if has_backward else None,
        left=EndSums(layers=alike, gradients=after, head=loss),
        entered=EndSums(layers=alike, gradients=before),
    )


def _in_chunks(params: Any, model: ModelConfig, execution: ExecutionConfig) -> Any:
    """Return parameters whose staged scan is [chunks, layers of a chunk on all stages ...]."""
    name = ModelParts.of(model).staged.name
    chunks = execution.pipeline_order.chunks

    def cut(x: Array) -> Array:
        spec = (None, *jax.typeof(x).sharding.spec)
        return reshape_to(x, (chunks, x.shape[0] // chunks, *x.shape[1:]), PartitionSpec(*spec))

    return params | {name: jax.tree.map(cut, params[name])}


def _gathered_in_chunks(gathered: Any, chunked: Any, model: ModelConfig) -> Any:
    """Return the gathered parameters, those of the staged scan in chunks.

    These are gathered after they are cut: chunks move to their stages as shards.

    Args:
        gathered: Gathered parameters; of the staged scan only dtype and layout are read.
        chunked: Sharded parameters, those of the staged scan in chunks.
        model: Model with the scan.
    """
    name = ModelParts.of(model).staged.name

    def gather(copy: Array, shards: Array) -> Array:
        spec = PartitionSpec(None, *jax.typeof(copy).sharding.spec)
        return reshape_to(shards.astype(copy.dtype), shards.shape, spec)

    return gathered | {name: jax.tree.map(gather, gathered[name], chunked[name])}


def _gradients(sums: PipelineSums, model: ModelConfig) -> dict[str, Any]:
    """Return the gradients of all parameters as they are stored."""
    parts = ModelParts.of(model)

    def join(x: Array) -> Array:
        spec = jax.typeof(x).sharding.spec[1:]
        return reshape_to(x, (x.shape[0] * x.shape[1], *x.shape[2:]), PartitionSpec(*spec))

    staged = jax.tree.map(join, sums.gradients)
    gradients = dict(sums.entered.gradients) | {parts.staged.name: staged} | sums.left.gradients
    for name, gradient in sums.left.head.gradients.items():
        scan_gradient = gradients.get(name)
        gradients[name] = (
            gradient if scan_gradient is None else jax.tree.map(jnp.add, scan_gradient, gradient)
        )
    return gradients


def _losses(sums: PipelineSums) -> dict[str, Array]:
    """Return the losses of the balancers, summed over all layers."""
    records = [sums.stages, *sums.entered.layers.values(), *sums.left.layers.values()]
    names = dict.fromkeys(name for record in records for name in record.losses)
    return {
        name: jnp.sum(jnp.stack([jnp.sum(r.losses[name]) for r in records if name in r.losses]))
        for name in names
    }


def _statistics(
    sums: PipelineSums, model: ModelConfig, execution: ExecutionConfig
) -> RouterStatistics | None:
    """Return the routing statistics of the step, stacked over the MoE layers."""
    parts = ModelParts.of(model)
    placement = execution.placement

    def join(leaf: Array) -> Array:
        placed = placement.place(leaf, (None,) * leaf.ndim)
        return placed.reshape(-1, *leaf.shape[2:])

    parts_statistics = [sums.entered.layers[scan.name].statistics for scan in parts.before]
    parts_statistics.append(jax.tree.map(join, sums.stages.statistics))
    parts_statistics += [sums.left.layers[scan.name].statistics for scan in parts.after]
    routed = [statistics for statistics in parts_statistics if statistics is not None]
    if not routed:
        return None
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *routed)
