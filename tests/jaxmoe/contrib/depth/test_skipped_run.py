# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run that leaves out layers: its losses on stages and without them, what it says of itself."""

import dataclasses

import numpy as np
import pytest

from experiments import recipes
from jaxmoe.contrib.depth.skipping import SkippingConfig
from jaxmoe.data import MarkovConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import LinearConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.run import Run
from jaxmoe.run.config import CheckpointConfig, EvaluationConfig, TrackingConfig
from sharding import MeshConfig
from tests.support.runs import logged_losses

STEPS = 4


def _run(directory, mesh, skipping):
    """The summary of a finished run, and its losses."""
    given = recipes.markov(steps=STEPS, batch_size=16, sequence_length=16)
    given = dataclasses.replace(
        given,
        model=ModelConfig(
            vocab_size=8,
            num_layers=2,
            embed_dim=16,
            attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=16),
            moe=MoEConfig(num_experts=4, top_k=2, expert_dim=16),
        ),
        data=MarkovConfig(),
        schedule=LinearConfig(warmup_steps=2),
        training=dataclasses.replace(given.training, accumulation=2, skipping=skipping),
        execution=dataclasses.replace(
            given.execution, mesh=mesh, precision=PrecisionPolicy(compute="float32")
        ),
        evaluation=EvaluationConfig(every=0, batches=2),
        checkpoint=CheckpointConfig(every=0),
        tracking=TrackingConfig(trackers=(), sample_length=0),
    )
    result = Run(given, directory).train()
    assert result.status == "done"
    return result.summary, logged_losses(directory)


@pytest.mark.slow
def test_a_run_on_stages_has_the_losses_of_one_without(tmp_path, capfd):
    half = SkippingConfig(groups=2, ratio=0.5)
    staged, found = _run(tmp_path / "staged", MeshConfig(stage=2, data=4), half)
    plain, wanted = _run(tmp_path / "plain", MeshConfig(data=4, expert=2), half)
    said = capfd.readouterr()
    text = said.out + said.err
    assert "skipping 50% of 2 groups of layers: 42% less time in layers planned" in text
    assert "skipping 50% of 2 groups of layers, masked: no time saved without stages" in text
    expected = {"groups": 2, "left_out": 1}
    assert staged["skipping"] == expected | {"time_saved": pytest.approx(5 / 12)}
    assert plain["skipping"] == expected | {"time_saved": 0.0}
    assert len(found) == STEPS
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-3)
    held_out = [summary["eval_bits_per_token"] for summary in (staged, plain)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-3)
