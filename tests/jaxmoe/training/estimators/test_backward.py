# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which member of `Backward` differentiates a step, and what it refuses where the step is made."""

import dataclasses

import pytest

from jaxmoe import catalog
from jaxmoe.contrib.adapters.remix import RemixConfig
from jaxmoe.contrib.adapters.repeated import RepeatedBackward
from jaxmoe.execution import ExecutionConfig
from jaxmoe.training.estimators.backward import backward_of
from jaxmoe.training.gradients import MicroBatchBackward
from jaxmoe.training.pipeline.gradients import PipelineBackward
from jaxmoe.training.step import Step
from sharding import MeshConfig
from sharding.pipeline import InterleavedConfig
from tests.support import one_step
from tests.support.models import TINY

ONE_DEVICE = ExecutionConfig()
STAGES = ExecutionConfig(mesh=MeshConfig(stage=2))
DRAWN = dataclasses.replace(TINY, adapter=RemixConfig(rank=2))


def step_of(model=TINY, execution=ONE_DEVICE):
    return Step(model=model, optimizer=one_step.SGD, execution=execution, accumulation=2)


def test_the_execution_and_the_adapter_name_the_member():
    assert backward_of(step_of()) == MicroBatchBackward()
    assert backward_of(step_of(execution=STAGES)) == PipelineBackward()
    assert backward_of(step_of(DRAWN)) == RepeatedBackward(MicroBatchBackward())
    assert set(catalog.names("backward")) == {"micro_batches", "pipeline", "probed", "repeated"}


@pytest.mark.parametrize(
    ("execution", "text"),
    [
        (dataclasses.replace(STAGES, pipeline=InterleavedConfig(chunks=4)), "chunks"),
    ],
)
def test_what_a_pipeline_cannot_train_is_refused_where_the_step_is_made(execution, text):
    with pytest.raises(ValueError, match=text):
        step_of(execution=execution)
