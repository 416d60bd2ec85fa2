# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Configs of older versions are migrated without changing their meaning."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import pathlib

import pytest

from experiments.recipes import RECIPES
from jaxmoe.checkpoint.manifest import SCHEMA, CheckpointManifest
from jaxmoe.checkpoint.migrate import ADDED, Added, migrate
from jaxmoe.configs import from_json, to_json
from jaxmoe.models import presets
from jaxmoe.models.config import ModelConfig
from jaxmoe.optim import AdamWConfig, WarmupStableDecayConfig
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.scaling import HYPERP_BASE, StandardConfig

SAVED = sorted(pathlib.Path("tests/golden/configs").glob("*.json"))
"""Configs of all recipes as the first version wrote them; never regenerate these files."""


def first_recipe(name: str) -> PretrainConfig:
    """Return a recipe as it was in the first version."""
    config = RECIPES[name]()
    if name == "tiny":  # AdamW, more steps
        return dataclasses.replace(
            config,
            model=presets.tiny(),
            training=dataclasses.replace(config.training, steps=400),
            optimizer=AdamWConfig(learning_rate=4e-3, weight_decay=0.1),
            schedule=WarmupStableDecayConfig(warmup_steps=20, decay_fraction=0.4, floor=0.05),
            parameterization=StandardConfig(),
            base=HYPERP_BASE,
            evaluation=dataclasses.replace(config.evaluation, every=80),
            checkpoint=dataclasses.replace(config.checkpoint, every=120),
        )
    if name in ("d8", "d12", "d16", "d20", "d24"):  # 63 experts
        moe = dataclasses.replace(config.model.moe, num_experts=63)
        return dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))
    return config


@pytest.mark.parametrize("file", SAVED, ids=[file.stem for file in SAVED])
def test_config_saved_by_the_first_version_equals_the_recipe(file):
    config = from_json(PretrainConfig, migrate(json.loads(file.read_text())))
    wanted = first_recipe(file.stem)  # in which None stood for one layer
    execution = dataclasses.replace(wanted.execution, unroll=wanted.execution.unroll or 1)
    assert config == dataclasses.replace(wanted, execution=execution)


def test_every_recipe_of_the_first_version_has_a_saved_config():
    assert {file.stem for file in SAVED} >= {"tiny", "hyperp", "markov", "olmoe_1b_7b", "d24"}


def test_migrating_the_config_of_today_changes_nothing():
    for recipe in RECIPES.values():
        today = to_json(recipe())
        assert migrate(today) == today
    model = to_json(RECIPES["tiny"]().model)
    assert migrate(model) == model


@pytest.mark.parametrize("study", ["gates", "outer", "routers", "transfer"])
def test_migrating_the_config_of_a_study_changes_nothing(study):
    for recipe in importlib.import_module(f"experiments.studies.{study}.config").RECIPES.values():
        today = to_json(recipe())
        assert migrate(today) == today


def test_every_added_field_exists_in_some_recipe_of_today():
    configs = [to_json(recipe()) for recipe in RECIPES.values()]
    for field in ADDED:
        filled = [migrate(config, [dataclasses.replace(field, value=None)]) for config in configs]
        assert filled == configs, field.path


CHANGES = (
    Added("model.later", None),
    Added("model.moe.router.score", "softmax"),
    Added("optimizer[adamw].flavour", {"a": [1]}),
    Added("optimizer[muon].flavour", 0),
    Added("model.window_pattern", []),
    Added("data.parts.*.weights", None),
)


def test_missing_fields_are_filled_in_where_their_object_exists():
    old = to_json(RECIPES["markov"]()) | {"data": {"kind": "mixture", "parts": [{"name": "a"}, {}]}}
    before = copy.deepcopy(old)
    new = migrate(old, CHANGES)
    assert old == before
    assert new["model"]["later"] is None
    assert new["model"]["moe"]["router"]["score"] == "softmax"
    assert new["optimizer"]["flavour"] == {"a": [1]}
    assert new["data"]["parts"] == [{"name": "a", "weights": None}, {"weights": None}]
    dense = old | {"model": old["model"] | {"moe": None}}
    assert migrate(dense, CHANGES)["model"]["moe"] is None


def test_fields_that_are_there_keep_their_value():
    old = to_json(RECIPES["tiny"]())
    old["model"]["later"] = 7
    assert migrate(old, CHANGES)["model"]["later"] == 7


def test_config_of_a_model_alone_is_migrated_and_foreign_json_is_not():
    model = to_json(ModelConfig())
    new = migrate(model, CHANGES)
    assert new["later"] is None and new["moe"]["router"].pop("score") == "softmax"
    assert new == model | {"later": None, "window_pattern": []}
    for foreign in ({}, {"note": "mine"}, {"model": "mine"}):
        assert migrate(foreign, CHANGES) == foreign


def test_run_directory_and_manifest_read_an_older_config(tmp_path, monkeypatch):
    today = RECIPES["tiny"]()
    old = to_json(today)
    removed = old["training"].pop("accumulation")
    manifest = {"schema": SCHEMA, "step": 1, "arrays": {}, "data": {}, "config": old}
    run = RunDirectory(tmp_path)
    run.config_file.write_text(json.dumps(old))
    with pytest.raises(ValueError, match=r"training\.accumulation"):
        run.load_config(PretrainConfig)

    changes = (Added("training.accumulation", removed),)
    monkeypatch.setattr("jaxmoe.checkpoint.migrate.ADDED", changes)
    assert run.load_config(PretrainConfig) == today
    run.check_config(today)
    assert CheckpointManifest.from_json(manifest, "here").config == to_json(today)
