# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws a pipeline for a share of the runs of `meshes`.

It takes a generator of its own, so that the draws without stages are those of a run before
pipelines were drawn.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.run.config import PretrainConfig
from sharding.pipeline import GPipeConfig, InterleavedConfig
from tests.fuzz.outcome import is_likely, pick

SHARE = 0.3
"""Share of the draws of `meshes` that have stages."""


def draw_stages(
    rng: np.random.Generator, config: PretrainConfig, share: float = SHARE
) -> PretrainConfig:
    """Return the run with 2 or 4 stages in place of other axes, or unchanged.

    Args:
        rng: Generator of the pipeline alone.
        config: Run without stages.
        share: Share of the draws that get stages.

    Raises:
        ValueError: The choices do not fit each other.
    """
    if not is_likely(rng, share):
        return config
    execution = _execution(rng, config.execution)
    stages, chunks = execution.mesh.stage, execution.pipeline_order.chunks
    parts = pick(rng, (1, 2, 3, 4, 4, 8))
    if chunks > 1 and is_likely(rng, 0.9):
        parts = stages * pick(rng, (1, 2))
    training = dataclasses.replace(
        config.training, accumulation=parts, batch_size=parts * pick(rng, (2, 4, 4, 8))
    )
    model = _model(rng, config.model, stages * chunks)
    return dataclasses.replace(config, model=model, execution=execution, training=training)


def _execution(rng: np.random.Generator, execution: ExecutionConfig) -> ExecutionConfig:
    sizes = execution.mesh.by_axis
    stages = pick(rng, (2, 2, 4))
    for _ in range(stages.bit_length() - 1):
        axis = pick(rng, [axis for axis, size in sizes.items() if size > 1])
        sizes[axis] //= 2
    pipeline = pick(
        rng,
        (InterleavedConfig(), InterleavedConfig(chunks=2), InterleavedConfig(chunks=3))
        + (GPipeConfig(), InterleavedConfig(weight_gradients="deferred"))
        + (InterleavedConfig(chunks=2, weight_gradients="deferred"),),
    )
    kernels = execution.implementations
    if is_likely(rng, 0.5):  # the fused backward pass of experts on CPUs cannot be split
        kernels = dataclasses.replace(kernels, grouped_swiglu="reference")
    return dataclasses.replace(
        execution,
        kernels=kernels,
        mesh=dataclasses.replace(execution.mesh, **sizes | {"stage": stages}),
        fold=execution.fold if is_likely(rng, 0.5) else None,
        pipeline=pipeline,
        telemetry="brief" if is_likely(rng, 0.95) else execution.telemetry,
    )


def _model(rng: np.random.Generator, model: ModelConfig, groups: int) -> ModelConfig:
    num_layers = groups * max(1, len(model.layers)) * pick(rng, (1, 1, 2))
    dense: tuple[int, ...] = ()
    if model.moe is not None and is_likely(rng, 0.3):
        dense = pick(rng, ((0,), (num_layers,)))
        num_layers += 1
    return dataclasses.replace(model, num_layers=num_layers, dense_layers=dense)
