# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Turns a configuration into plan, devices and data, with all checks that need no compilation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Key

from jaxmoe.data import Batch, Loader, Source, SourceKind, check_hosts, evaluation_batches
from jaxmoe.data.mixture import tasks_of
from jaxmoe.data.repacking import Repacking
from jaxmoe.data.text_only import build_text
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.quantize import abstract_params, quantized_params
from jaxmoe.optim.steps import backward_name
from jaxmoe.planning.abstract_step import abstract_state, shapes_after
from jaxmoe.planning.attached import attached_chip
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.plan import RunPlan, check_mesh, make_plan
from jaxmoe.training.accumulation import accumulation_of
from jaxmoe.training.feed import Feed, LoaderFeed
from jaxmoe.training.parts.update import Update
from jaxmoe.training.replicas import WorkerGroup, WorkersJob
from jaxmoe.training.state import InitOptions, TrainState, initializer
from jaxmoe.training.step import Step
from sharding.distributed import batch_part, global_batch
from sharding.mesh import make_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is assembled from."""

    config: PretrainConfig
    devices: Sequence[jax.Device]
    job: tuple[int, int] | None = None
    """Part of every batch that this job reads, and the number of parts, where jobs of their own
    share the batches; None for a job that reads all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembly:
    """A plan on devices, with its data."""

    plan: RunPlan
    execution: ExecutionConfig
    """Execution with the mesh resolved."""
    mesh: Mesh
    source: Source
    loader: Loader
    job: tuple[int, int] | None = None
    """Worker that this job is, and the number of workers, where each is a job of its own; None for
    a job that has all workers."""
    update: Update | None = None
    """How the step updates parameters and optimiser state; what the execution asks for when None.
    """

    def step(self, accumulation: int | None = None) -> Step:
        """Return the step of the run, or of one worker.

        Args:
            accumulation: Micro-batches of a step; those of the config when None.
        """
        plan = self.plan
        training = self.plan.config.training
        if accumulation is None:
            accumulation = self.micro_batches(training.batch_size)
        compared = self.workers.parts if training.gradients.is_backward else ()
        return Step(
            model=plan.model,
            optimizer=plan.optimizer,
            execution=self.execution,
            table=plan.table,
            max_norm_ratio=training.step_guard.max_norm_ratio,
            update=self.update,
            **training.step_options(
                accumulation=accumulation, parts=plan.config.step_parts + compared
            ),
        )

    def micro_batches(self, rows: int) -> int:
        """Return the micro-batches of a batch, those included that a step may leave out.

        Args:
            rows: Rows of the batch.
        """
        repacking = self.loader.repacking if self.reads_data else None
        if repacking is not None:
            return repacking.micro_batches
        training = self.plan.config.training
        return accumulation_of(rows, training.batch_size, training.accumulation)

    @functools.cached_property
    def workers(self) -> WorkerGroup:
        """Who trains: one worker that all devices share, or several that exchange something."""
        config = self.plan.config
        job = WorkersJob(
            sizes=self.execution.mesh,
            mesh=self.mesh,
            table=self.plan.table,
            step_of=self.step,
            steps=config.training.steps,
            place=self.job,
        )
        return config.replicas.make_workers(job)

    @property
    def batch_part(self) -> tuple[int, int]:
        """Part of every batch that this process reads, and the number of parts."""
        return batch_part(self.mesh) if self.job is None else self.job

    def new_state(self) -> TrainState:
        """Return the state before the first step."""
        return self.workers.begin(self.new_world())

    def new_world(self) -> TrainState:
        """Return the state before the first step, without workers."""
        state = self._initializer(jax.random.key(self.plan.config.training.seed))
        precision = self.execution.precision
        rules = self.execution.axis_rules
        if precision.weights == "floating":
            return state
        rounded = quantized_params(self.plan.table, state.params, precision, rules, self.mesh)
        return dataclasses.replace(state, params=rounded)

    @functools.cached_property
    def _initializer(self) -> Callable[[Key[Array, ""]], TrainState]:
        options = InitOptions(
            execution=self.execution,
            parameterization=self.plan.parameterization,
            mesh=self.mesh,
            gradients=self.plan.config.training.gradients,
            parts=self.plan.config.step_parts,
        )
        return initializer(self.plan.model, self.plan.optimizer, options)

    def state_shapes(self) -> TrainState:
        """Return shapes and shardings of `new_state`, of which nothing is computed."""
        training = self.workers.training
        shapes = self.world_shapes()
        return shapes if training is None else shapes_after(training.begin, shapes, self.mesh)

    def world_shapes(self) -> TrainState:
        """Return shapes and shardings of `new_world`."""
        plan = self.plan
        precision = self.execution.precision
        shapes = abstract_state(plan.step_plan(self.execution), self.mesh)
        if precision.weights == "floating":
            return shapes
        rules = self.execution.axis_rules
        dtype = precision.parameter_dtype
        params = abstract_params(plan.table, precision.weights, dtype, rules, self.mesh)
        return dataclasses.replace(shapes, params=params)

    @property
    def reads_data(self) -> bool:
        """Whether steps are taken on rows of the data, not on batches that the run makes."""
        return self.plan.config.rl is None

    @functools.cached_property
    def feed(self) -> Feed:
        """Where the batches come from; nothing is opened yet."""
        config = self.plan.config
        if config.rl is not None:
            return config.rl.build(self.plan, self.execution, self.mesh, self.source)
        return LoaderFeed(
            loader=self.loader,
            mesh=self.mesh,
            part=self.batch_part,
            last_step=config.training.steps,
        )

    def held_out(self) -> Iterator[Batch]:
        """Return the held-out batches on the devices, the same ones at every call."""
        index, count = batch_part(self.mesh)
        rows = evaluation_batches(
            self.source,
            batch_size=self.plan.config.held_out_batch_size,
            sequence_length=self.plan.config.training.sequence_length,
            num_batches=self.plan.config.evaluation.batches,
            process_index=index,
            process_count=count,
        )
        return (global_batch(batch, self.mesh) for batch in rows)


def _with_tasks(plan: RunPlan, source: Source) -> Source:
    """Return a source whose rows have the number of their part, if the adapter reads tasks.

    Args:
        plan: Model with its adapter.
        source: Source of the rows; one that is no mixture stays as it is.

    Raises:
        ValueError: The adapter has fewer tasks than the mixture has parts, or rows are packed anew.
    """
    adapter: Any = plan.model.adapter
    if adapter is None or "task" not in adapter.reads:
        return source
    if plan.config.data.traits.packs_levels:
        raise ValueError(
            f"adapter:{adapter.name} reads the task of each row, and documents that are packed by"
            " level change their rows: leave data.levels out"
        )
    return tasks_of(source, adapter.num_tasks, adapter.name)


def assemble(
    config: PretrainConfig,
    *,
    data: SourceKind | None = None,
    needs_data: bool = True,
    trains: bool = False,
    source: Source | None = None,
    devices: Sequence[jax.Device] | None = None,
    job: tuple[int, int] | None = None,
) -> Assembly:
    """Return everything a run needs, after all checks that need no compilation.

    Args:
        config: Configuration of a run.
        data: Config to read the data with, such as one with a copy of the tokenizer; that of the
            run when None.
        needs_data: Whether rows will be read; False reads the tokenizer alone where it can.
        trains: Whether the run is trained.
        source: Data that were read already; None reads them.
        devices: Devices of the mesh; all of the job when None.
        job: See `Setting`.

    Raises:
        ValueError: Sizes do not divide, the vocabulary is too small for the data, there are too few
            data, or the precision does not fit the attention.
    """
    devices = jax.devices() if devices is None else devices
    mesh_config = config.execution.mesh.resolve(len(devices))
    execution = dataclasses.replace(config.execution, mesh=mesh_config)
    if execution.mesh_fold is not None:  # the rules of a fold need every size
        config = dataclasses.replace(config, execution=execution)
    plan = make_plan(config)
    for kind in plan.model.kinds:
        kind.mixer.check_precision(execution.precision)
    mesh = make_mesh(
        mesh_config, devices, fold=execution.mesh_fold, host_order=config.process_order
    )
    execution.implementations.prepare(mesh, left_out=_find_uncalled(plan, execution))
    check_mesh(plan, execution, trains=trains)
    if source is None:
        source = _read_data(config, data, needs_data=needs_data)
    _check_vocabulary(config, source)
    source = _with_tasks(plan, source)
    training = config.training
    loader = Loader(
        source,
        batch_size=training.batch_size if config.rl is None else config.held_out_batch_size,
        sequence_length=training.sequence_length,
        seed=training.seed,
        batch_sizes=training.batch_sizes if training.batch_ramp else None,
        repacking=_repacking(plan, execution, mesh) if config.data.traits.packs_levels else None,
    )
    assembly = Assembly(
        plan=plan,
        execution=execution,
        mesh=mesh,
        source=source,
        loader=loader,
        job=job,
    )
    if job is None:
        index, count = assembly.batch_part
        check_hosts(loader, process_index=index, process_count=count)
    if trains:
        assembly.workers.check()
    assembly.held_out()  # raises if there are too few held-out data
    return assembly


def _find_uncalled(plan: RunPlan, execution: ExecutionConfig) -> frozenset[str]:
    """Return operations with kernels that no product of a run calls: comparing them takes a start
    on a GPU longer than compiling."""
    is_plain = (
        not {"quantized_matmul", "grouped_matmul"} & {*execution.precision.matmul.kernels}
        and execution.precision.weights == "floating"
        and execution.telemetry == "brief"
        and plan.model.adapter is None
        and backward_name(plan.optimizer) is None
    )
    names = ("quantized_matmul", "grouped_matmul", "grouped_outer")
    return frozenset(names if is_plain else ())


def _read_data(config: PretrainConfig, data: SourceKind | None, *, needs_data: bool) -> Source:
    kind = config.data if data is None else data
    seed = config.training.seed
    return kind.build(seed) if needs_data else build_text(kind, seed)


def _check_vocabulary(config: PretrainConfig, source: Source) -> None:
    """Refuse data with more token ids than the vocabulary of the model.

    Args:
        config: Configuration of a run.
        source: Its data.

    Raises:
        ValueError: Names both sizes, and the way out.
    """
    model = config.model
    num_masks = model.vocab_size - config.training.objective.num_predicted(model)
    vocab_size = source.vocab_size + num_masks
    if vocab_size <= model.vocab_size:
        return
    way_out = f"give --model.vocab_size {vocab_size}"
    if (path := config.checkpoint.initial_path) is not None:
        way_out = (
            f"checkpoint.initial.path={path} has no embeddings for the ids from {model.vocab_size}"
            " on, and none are added. Leave data.tokenizer out, which takes the model's own, or"
            " name one of fewer ids"
        )
    raise ValueError(
        f"model.vocab_size={model.vocab_size} is smaller than the vocabulary of the data"
        f" ({source.vocab_size} token ids){' and the mask' if num_masks else ''}: {way_out}"
    )


def _repacking(plan: RunPlan, execution: ExecutionConfig, mesh: Mesh) -> Repacking:
    """Return what packs the documents of a step again."""
    chip = attached_chip(mesh.devices.flat[0])
    return plan.config.assigner.repacking(plan.step_plan(execution), chip)


def entropy_floor(assembly: Assembly) -> float | None:
    """Return the lowest held-out loss in bits per token; None where it is not known."""
    training = assembly.plan.config.training
    return training.objective.entropy_floor(assembly.source, training.sequence_length)


def describe_devices(devices: Iterable[jax.Device]) -> list[str]:
    """Return devices as strings, for environment.json."""
    return [f"{device.platform}:{device.id} {device.device_kind}" for device in devices]


def describe_mesh(mesh: Mesh) -> dict[str, Any]:
    """Return the mesh axes larger than 1, by name; {"devices": 1} if there are none."""
    large = {axis: size for axis, size in mesh.shape.items() if size > 1}
    return large or {"devices": 1}
