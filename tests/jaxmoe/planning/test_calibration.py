# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Temporaries of deep models from shallow ones: the depths to compile, and the error."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.plan.config import RECIPES, step_plan
from jaxmoe.configs import to_json
from jaxmoe.models.config import AttentionConfig, LayerConfig
from jaxmoe.planning.compile_ahead import in_child
from jaxmoe.planning.corrections.calibration import Line, shallow_depths
from jaxmoe.planning.hardware import parse_topology
from jaxmoe.planning.memory import estimate_memory
from sharding.mesh import MeshConfig
from sharding.pipeline import InterleavedConfig

CONFIG, ALONE = RECIPES["tiny"](), MeshConfig()


def depths(number, *, unroll=1, mesh=ALONE, chunks=1, model=None):
    execution = dataclasses.replace(
        CONFIG.execution, unroll=unroll, mesh=mesh, pipeline=InterleavedConfig(chunks=chunks)
    )
    return shallow_depths(cut(number, model or {}), execution)


def cut(number, model):
    return dataclasses.replace(CONFIG.model, num_layers=number, **model)


def turns(number, unroll, model):
    """Turns of each loop of a model, and iterations after it."""
    scans = cut(number, model).scans
    kinds = [scan.name.rpartition("_")[0] for scan in scans]  # without the first layer's number
    return [(kind, *divmod(scan.length, unroll)) for kind, scan in zip(kinds, scans, strict=True)]


@pytest.mark.parametrize(
    "number, unroll, model",
    [
        (24, 1, {}),
        (24, 4, {}),
        (23, 4, {}),
        (31, 2, {"dense_layers": (0, 1, 2)}),
        (30, 3, {"layers": (LayerConfig(), LayerConfig(mixer=AttentionConfig(window=8)))}),
        (31, 1, {"layers": (LayerConfig(), LayerConfig(mixer=AttentionConfig(window=8)))}),
    ],
)
def test_shallow_models_differ_in_the_turns_of_one_loop_alone(number, unroll, model):
    found = depths(number, unroll=unroll, model=model)
    assert found is not None
    shapes = [turns(depth, unroll, model) for depth in (*found, number)]
    first, second, deep = ([(kind, left) for kind, _, left in shape] for shape in shapes)
    assert first == second == deep
    numbers = [max(turn for _, turn, _ in shape) for shape in shapes]
    few = max(2, numbers[2] // 3)
    assert numbers[:2] == [few, 2 * few] and numbers[2] > 2 * few


def test_stages_keep_whole_groups_and_shallow_models_are_not_cut():
    assert depths(48, unroll=4, mesh=MeshConfig(stage=4), chunks=2) == (16, 32)
    assert depths(5) == (2, 4)
    assert depths(48) == (16, 32)
    assert depths(4) is None
    assert depths(16, unroll=4) is None


def test_a_line_goes_through_its_points():
    line = Line(depths=(8, 16), temporaries=(100, 140))
    assert [line.at(layers) for layers in (8, 16, 24)] == [100, 140, 180]


@pytest.mark.large
@pytest.mark.parametrize("unroll", [1, 4])
def test_a_deep_model_compiles_to_what_its_shallow_ones_predict(unroll):
    """Within 10%, where the closed form is off by more than a quarter."""
    topology, layers = parse_topology("tpu:v5e:2x2"), 25
    mesh = MeshConfig(data=4)
    execution = dataclasses.replace(CONFIG.execution, unroll=unroll, mesh=mesh)
    config = dataclasses.replace(CONFIG.pretrain, execution=execution)

    def at(layers):
        return dataclasses.replace(
            config, model=dataclasses.replace(config.model, num_layers=layers)
        )

    def temporaries(layers):
        job = {"config": to_json(at(layers)), "topology": topology.text, "steps": 0}
        return in_child("experiments.plan.child", job, topology)["temporaries"]

    found = shallow_depths(at(layers).model, execution)
    assert found is not None
    line = Line(depths=found, temporaries=(temporaries(found[0]), temporaries(found[1])))
    compiled = temporaries(layers)
    assert line.at(layers) == pytest.approx(compiled, rel=0.1)
    closed = estimate_memory(step_plan(at(layers), topology, mesh), "tpu").temporaries
    assert closed != pytest.approx(compiled, rel=0.1)
