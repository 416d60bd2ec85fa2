# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of every kind of state that go on on other devices equal those that stayed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import AdamWConfig, MuonConfig, MuonHConfig
from jaxmoe.run import Run
from jaxmoe.scaling import HyperPConfig, MuPMuonConfig, StandardConfig
from sharding import MeshConfig
from sharding.fold import MoEMesh
from tests.jaxmoe.contrib.elastic.test_resize import asked, config, train
from tests.support.runs import logged_losses

STEPS = 9
DATA = ExecutionConfig(mesh=MeshConfig(data=8))
STAGES = ExecutionConfig(mesh=MeshConfig(stage=2, data=4))
FOLDED = ExecutionConfig(mesh=MeshConfig(data=8), fold=MoEMesh(expert=2))
MUON = MuonConfig(learning_rate=0.01), MuPMuonConfig()
MUONH = MuonHConfig(learning_rate=0.01), HyperPConfig()
ADAMW = AdamWConfig(learning_rate=0.003), StandardConfig()


def run_of(directory, execution, optimizer, parameterization):
    given = config()
    model = ModelConfig(
        vocab_size=24,
        num_layers=2,
        embed_dim=24,
        attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=24),
        moe=MoEConfig(num_experts=4, top_k=2, expert_dim=24),
    )
    training = dataclasses.replace(
        given.training,
        steps=STEPS,
        accumulation=2 if execution.mesh.stage > 1 else 1,
        batch_size=16,
    )
    given = dataclasses.replace(
        given,
        model=model,
        training=training,
        execution=execution,
        optimizer=optimizer,
        parameterization=parameterization,
    )
    return Run(given, directory)


@pytest.mark.large
@pytest.mark.parametrize(
    "execution, rule, fewer",
    [
        pytest.param(DATA, MUON, 4, id="muon"),
        pytest.param(DATA, MUONH, 4, id="muonh"),
        pytest.param(STAGES, ADAMW, 2, id="stages"),
        pytest.param(STAGES, MUONH, 2, id="stages_muonh"),
        pytest.param(FOLDED, ADAMW, 4, id="fold"),
        pytest.param(FOLDED, MUONH, 4, id="fold_muonh"),
    ],
)
def test_fewer_devices_and_all_again_equal_all(tmp_path, execution, rule, fewer):
    stays, moves = (run_of(tmp_path / name, execution, *rule) for name in ("stays", "moves"))
    assert stays.train().status == "done"
    train(moves, {2: asked("fewer", fewer), 5: asked("all", execution.mesh.data)})
    assert moves.result is not None and moves.result.status == "done"
    summary = moves.summary()
    assert summary is not None
    events = summary["resizes"]
    assert [len(event["devices"]) for event in events] == [8 * fewer // execution.mesh.data, 8]
    wanted, found = (logged_losses(run.directory.path) for run in (stays, moves))
    assert [*found] == [*wanted] == [*range(1, STEPS + 1)]
    np.testing.assert_allclose([*found.values()], [*wanted.values()], rtol=1e-5)
