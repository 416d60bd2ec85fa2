# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds what all methods of `outer` share: batches, initial values, and the evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from experiments.studies.data import check_vocabulary, digest_of, loader_of
from experiments.studies.outer.config import BASELINE, OuterConfig, run_of
from experiments.studies.programs import RARE
from jaxmoe.data import Batch, evaluation_batches
from jaxmoe.data.synthetic import SyntheticSource
from jaxmoe.run.plan import RunPlan, make_plan
from jaxmoe.scaling.initialize import init_params
from jaxmoe.training.evaluate import make_eval_step
from jaxmoe.training.state import state_around
from sharding.distributed import global_batch
from sharding.mesh import MeshConfig, make_mesh

Evaluate = Callable[[Any, Any, Batch], tuple[Array, Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterTask:
    """Language, batches and initial values of every seed, and the evaluation."""

    source: SyntheticSource
    mesh: Mesh
    training: tuple[tuple[Batch, ...], ...]
    """Batches of each seed, one per step, on the host."""
    held_out: tuple[Batch, ...]
    """Held-out batches on the devices."""
    params: tuple[Any, ...]
    """Initial parameters of each seed, on the devices."""
    evaluate: Evaluate
    """Program from parameters, router state and a held-out batch to the sums of nll and weights."""
    floor: float
    """Exact entropy of the language in bits per token."""
    digest: str
    """Digest of the data."""


def key_of(config: OuterConfig, number: int) -> Array:
    """Return the key of one seed."""
    return jax.random.key(config.training.seed + number)


def source_of(config: OuterConfig) -> SyntheticSource:
    """Return the language.

    Raises:
        ValueError: The vocabulary of the model is too small.
    """
    source = config.data.build(config.training.seed)
    check_vocabulary(source, config.model)
    return source


def mesh_of(config: OuterConfig) -> Mesh:
    """Return the mesh, on the first devices.

    Raises:
        ValueError: There are too few devices.
    """
    devices = jax.devices()
    if len(devices) < config.replica:
        raise ValueError(
            f"replica={config.replica} needs as many devices, there are {len(devices)}: give"
            " --replica 1, which trains all workers on one"
        )
    return make_mesh(MeshConfig(replica=config.replica), devices[: config.replica])


def load_task(config: OuterConfig) -> OuterTask:
    """Return what all methods share.

    Raises:
        ValueError: Too few devices, or the parts of the config do not fit each other.
    """
    source = source_of(config)
    mesh = mesh_of(config)
    training = config.training
    plan = make_plan(run_of(config, BASELINE))
    first = training.seed
    batches = []
    for seed in range(first, first + config.seeds):
        loader = loader_of(config.data.build(seed), training, seed)
        batches.append(tuple(loader.batch(step) for step in range(training.steps)))
    rows = evaluation_batches(
        source,
        batch_size=config.worker_rows,
        sequence_length=training.sequence_length,
        num_batches=config.evaluation_batches,
    )
    held_out = tuple(global_batch(batch, mesh) for batch in rows)
    params = tuple(
        init_params(
            plan.model,
            jax.random.fold_in(key_of(config, number), 0),
            parameterization=plan.parameterization,
            mesh=mesh,
            rules=plan.config.execution.axis_rules,
            dtype=plan.config.execution.precision.parameter_dtype,
        )
        for number in range(config.seeds)
    )
    return OuterTask(
        source=source,
        mesh=mesh,
        training=tuple(batches),
        held_out=held_out,
        params=params,
        evaluate=_compile_evaluation(plan, mesh, params[0], held_out[0]),
        floor=source.entropy_bits_per_token(training.sequence_length),
        digest=digest_of([source]),
    )


def _compile_evaluation(plan: RunPlan, mesh: Mesh, params: Any, batch: Batch) -> Evaluate:
    """Return the compiled evaluation, which is the same for all methods."""
    execution = plan.config.execution
    step: Any = make_eval_step(
        plan.model, execution=execution, objective=plan.config.training.objective
    )
    with jax.set_mesh(mesh):
        key = jax.random.key(0)
        state = jax.eval_shape(
            lambda params: state_around(plan.model, None, execution, params, key), params
        )
        return step.lower(params, state.router_state, batch).compile(compiler_options=RARE)
