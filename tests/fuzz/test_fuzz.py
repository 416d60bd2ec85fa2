# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A few draws of every fuzzer; many are drawn by `python -m tests.fuzz`.

JAXMOE_FUZZ_SEED and JAXMOE_FUZZ_DRAWS choose others.
"""

import collections
import contextlib
import os
from typing import get_args

import jax
import numpy as np
import pytest

from jaxmoe.catalog import choice
from jaxmoe.execution import Remat
from jaxmoe.models.config import ModelConfig
from jaxmoe.run.assemble import make_plan
from jaxmoe.run.config import PretrainConfig
from sharding import MeshConfig
from sharding.state_layouts import STATE_LAYOUTS
from tests.fuzz import meshes, pairs
from tests.fuzz.draws import KINDS, Failure, run
from tests.fuzz.frozen import draw_frozen, freeze
from tests.fuzz.outcome import Outcome, refusal

SEED = int(os.environ.get("JAXMOE_FUZZ_SEED", "0"))
DRAWS = int(os.environ.get("JAXMOE_FUZZ_DRAWS", "3"))


@pytest.mark.slow
@pytest.mark.rows(DRAWS * len(KINDS))
@pytest.mark.parametrize("index", range(DRAWS))
@pytest.mark.parametrize("kind", KINDS)
def test_draws(kind, index):
    run(kind, SEED, index)


EXPERT = {"execution.mesh": MeshConfig(data=2, expert=4)}
MESHES = (
    *pairs.MESHES,
    {"execution.mesh": MeshConfig(data=2, expert=2, tensor=2)},
    {"execution.mesh": MeshConfig(replica=2, expert=4)},
    {"execution.mesh": MeshConfig(stage=2, expert=4), "training.accumulation": 2},
    {
        "execution.mesh": MeshConfig(data=2, expert=2, seq=2),
        "execution.sequence_parallel": choice("sequence_parallel", "ring")(),
    },
    *(EXPERT | {"execution.rules": name} for name in STATE_LAYOUTS if name != "zero1"),
)


@pytest.mark.slow
@pytest.mark.rows(len(MESHES))
@pytest.mark.parametrize("mesh", MESHES, ids=range(len(MESHES)))
def test_rows_that_are_sent_again_change_nothing_on_any_mesh(mesh):
    dispatcher = choice("dispatcher", "all_to_all")(experts_keep="inputs")
    outcome = pairs.compare_with({"execution.dispatcher": dispatcher, **mesh})
    assert outcome.name == "equal", outcome.text


def test_a_failed_draw_names_the_command_that_repeats_it(monkeypatch):
    monkeypatch.setattr(meshes, "check", lambda rng, place: 1 / 0)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    with pytest.raises(Failure) as failure:
        run("meshes", 7, 11)
    command = "python -m tests.fuzz --kind meshes --seed 7 --first 11 --draws 1"
    assert command in str(failure.value) and "ZeroDivisionError" in str(failure.value)


def test_a_draw_depends_on_its_seed_and_index_alone(monkeypatch):
    monkeypatch.setattr(meshes, "check", lambda rng, place: Outcome("equal", str(rng.random())))
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    drawn = [run("meshes", seed, index).text for seed, index in ((1, 2), (1, 3), (2, 2), (1, 2))]
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3


def test_draws_with_stages_reach_every_choice():
    """Schedules, layouts, remat, dispatchers and the experts whose backward pass can be split."""
    seen: dict[str, set] = collections.defaultdict(set)
    for index in range(300):
        with contextlib.suppress(ValueError):
            config = meshes.draw(np.random.default_rng((0, index)), staged=1.0)
            execution = config.execution
            assert execution.mesh.stage > 1
            seen["pipeline"].add(execution.pipeline_order)
            seen["remat"].add(execution.remat)
            seen["rules"].add(execution.rules)
            seen["dispatcher"].add(execution.dispatcher)
            seen["kernels"].add(execution.implementations.grouped_swiglu)
            seen["accumulation"].add(config.training.accumulation)
    assert {(one.name, one.chunks, one.is_deferred) for one in seen["pipeline"]} == {
        ("gpipe", 1, False),
        *(("interleaved", chunks, False) for chunks in (1, 2, 3)),
        *(("interleaved", chunks, True) for chunks in (1, 2)),
    }
    assert seen["remat"] == set(get_args(Remat))
    assert seen["rules"] == set(STATE_LAYOUTS)
    assert seen["dispatcher"] == set(meshes.DISPATCHERS)
    assert seen["kernels"] == {None, "reference"}
    assert {1, 2, 4, 8} <= seen["accumulation"]


def test_pairs_are_of_two_fields_and_in_no_row():
    draws = [pairs.draw(np.random.default_rng((0, index))) for index in range(100)]
    assert not any(pairs.is_in_table(fields) for fields in draws)
    assert pairs.is_in_table({"execution.mesh": MeshConfig(stage=2), "execution.halves": 2})
    seen = {path for fields in draws for path in fields}
    assert {"execution.mesh", "model.adapter", "training.gradients", "execution.rules"} <= seen


def test_frozen_roles_are_not_trained_and_the_others_are():
    plan = make_plan(PretrainConfig(model=ModelConfig(moe=None)))
    draws = [draw_frozen(np.random.default_rng(seed), plan.table) for seed in range(40)]
    roles = next(roles for roles in draws if roles)
    assert () in draws and len(set(draws)) > 3
    frozen = freeze(plan, roles)
    for before, after in zip(plan.table, frozen.table, strict=True):
        assert after.is_frozen == (before.declaration.role in roles)
        assert after.path == before.path and after.spec == before.spec
    assert 0 < len(frozen.table.trained_rows) < len(plan.table)
    assert freeze(plan, ()) is plan


def test_differences_above_rounding_are_found():
    wanted = {"metrics": [{"loss": np.float32(2.0), "nothing": np.float32(np.nan)}]}
    near = {"metrics": [{"loss": np.float32(2.000001), "nothing": np.float32(np.nan)}]}
    far = {"metrics": [{"loss": np.float32(2.5), "nothing": np.float32(0.0)}]}
    config = PretrainConfig(model=ModelConfig(moe=None))
    for found, is_far in ((near, False), (far, True)):
        pairs = meshes.differences(found, wanted, config)
        assert set(pairs) == {f"['metrics'][0]['{name}']" for name in ("loss", "nothing")}
        assert all((error > bound) == is_far for error, bound in pairs.values())


def test_errors_of_others_are_no_refusal():
    for raised in (lambda: int("x"), lambda: np.zeros(3).reshape(2, 2)):
        with pytest.raises(ValueError) as error:
            raised()
        with pytest.raises(AssertionError, match="not refused in words"):
            refusal(error.value)
