# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Configs of runs of version 0.2.0 are read by every later version, with the same meaning.

`pytest --regenerate-golden` writes them anew: until 0.2.0 is released, and never after.
"""

from __future__ import annotations

import json
import pathlib

import pytest

from experiments.recipes import RECIPES
from jaxmoe.checkpoint.manifest import SCHEMA, CheckpointManifest
from jaxmoe.configs import differences, from_json, to_json
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory

CONFIGS = pathlib.Path("tests/golden/configs")


@pytest.mark.parametrize("name", RECIPES)
def test_the_saved_config_of_a_recipe_is_the_recipe(name, request):
    path, recipe = CONFIGS / f"{name}.json", RECIPES[name]()
    if request.config.getoption("--regenerate-golden"):
        path.write_text(json.dumps(to_json(recipe), indent=1, sort_keys=True) + "\n")
    saved = json.loads(path.read_text())
    assert differences(saved, recipe) == [], "pytest --regenerate-golden, and review"
    assert from_json(PretrainConfig, saved) == recipe


def test_a_config_that_lacks_a_field_is_refused_with_its_name(tmp_path):
    recipe = RECIPES["tiny"]()
    saved = to_json(recipe)
    run = RunDirectory(tmp_path)
    run.config_file.write_text(json.dumps(saved))
    assert run.load_config(PretrainConfig) == recipe
    manifest = {"schema": SCHEMA, "step": 1, "arrays": {}, "data": {}, "config": saved}
    assert CheckpointManifest.from_json(manifest, "here").config == saved
    del saved["training"]["accumulation"]
    run.config_file.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"training\.accumulation"):
        run.load_config(PretrainConfig)
