# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A few draws of every fuzzer; many are drawn by `python -m tests.fuzz`.

JAXMOE_FUZZ_SEED and JAXMOE_FUZZ_DRAWS choose others.
"""

import os

import jax
import numpy as np
import pytest

from jaxmoe.models.config import ModelConfig
from jaxmoe.run.config import PretrainConfig
from tests.fuzz import meshes
from tests.fuzz.draws import KINDS, Failure, run
from tests.fuzz.outcome import Outcome, refusal

SEED = int(os.environ.get("JAXMOE_FUZZ_SEED", "0"))
DRAWS = int(os.environ.get("JAXMOE_FUZZ_DRAWS", "3"))


@pytest.mark.slow
@pytest.mark.rows(DRAWS * len(KINDS))
@pytest.mark.parametrize("index", range(DRAWS))
@pytest.mark.parametrize("kind", KINDS)
def test_draws(kind, index):
    run(kind, SEED, index)


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
