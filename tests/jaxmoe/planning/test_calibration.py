# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Temporaries of deep models from shallower ones: the depth to compile, and the error."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.plan.config import RECIPES, step_plan
from jaxmoe.configs import to_json
from jaxmoe.models.config import AttentionConfig, LayerConfig
from jaxmoe.planning.compile_ahead import in_child
from jaxmoe.planning.corrections.calibration import Anchor, shallow_depth
from jaxmoe.planning.hardware import parse_topology
from jaxmoe.planning.memory import estimate_memory
from sharding.mesh import MeshConfig
from sharding.pipeline import InterleavedConfig

CONFIG, ALONE = RECIPES["tiny"](), MeshConfig()


def depth_of(number, *, unroll=1, mesh=ALONE, chunks=1, model=None):
    execution = dataclasses.replace(
        CONFIG.execution, unroll=unroll, mesh=mesh, pipeline=InterleavedConfig(chunks=chunks)
    )
    return shallow_depth(cut(number, model or {}), execution)


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
    found = depth_of(number, unroll=unroll, model=model)
    assert found is not None
    shapes = [turns(depth, unroll, model) for depth in (found, number)]
    shallow, deep = ([(kind, left) for kind, _, left in shape] for shape in shapes)
    assert shallow == deep
    fewer, all_turns = (max(turn for _, turn, _ in shape) for shape in shapes)
    assert fewer == 2 * all_turns // 3 >= 2


def test_stages_keep_whole_groups_and_shallow_models_are_not_cut():
    assert depth_of(48, unroll=4, mesh=MeshConfig(stage=4), chunks=2) == 32
    assert depth_of(3) == 2
    assert depth_of(2) is None
    assert depth_of(8, unroll=4) is None


def test_an_anchor_adds_the_growth_of_the_closed_form():
    anchor = Anchor(depth=8, compiled=100, closed=60.0)
    assert [anchor.at(closed) for closed in (60.0, 90.0)] == [100.0, 130.0]


@pytest.mark.large
def test_a_deep_model_compiles_to_what_its_shallow_one_predicts():
    """Within 10%, where the closed form is half of it."""
    topology, layers = parse_topology("tpu:v5e:2x2"), 24
    mesh = MeshConfig(data=4)
    execution = dataclasses.replace(CONFIG.execution, mesh=mesh)
    config = dataclasses.replace(CONFIG.pretrain, execution=execution)

    def at(layers):
        return dataclasses.replace(
            config, model=dataclasses.replace(config.model, num_layers=layers)
        )

    def temporaries(layers):
        job = {"config": to_json(at(layers)), "topology": topology.text, "steps": 0}
        return in_child("experiments.plan.child", job, topology)["temporaries"]

    def closed(layers):
        return estimate_memory(step_plan(at(layers), topology, mesh), "tpu").temporaries

    depth = shallow_depth(at(layers).model, execution)
    assert depth is not None
    anchor = Anchor(depth=depth, compiled=temporaries(depth), closed=closed(depth))
    compiled = temporaries(layers)
    assert anchor.at(closed(layers)) == pytest.approx(compiled, rel=0.1)
    assert closed(layers) < 0.6 * compiled
