# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The warning about runs that do not fit the attached devices."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from experiments.recipes import RECIPES
from jaxmoe.planning import attached
from jaxmoe.planning.attached import memory_warning
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.routing import METHODS
from jaxmoe.run import Run, prepare
from jaxmoe.run.plan import make_plan


class Accelerator:
    platform = "tpu"

    def __init__(self, limit):
        self.limit = limit

    def memory_stats(self):
        return self.limit and {"bytes_limit": self.limit}


def step_plan(config):
    mesh = config.execution.mesh.resolve(1)
    return make_plan(config).step_plan(dataclasses.replace(config.execution, mesh=mesh))


def test_a_run_that_does_not_fit_is_named_with_both_sizes(monkeypatch):
    plan, device = step_plan(RECIPES["d24"]()), jax.local_devices()[:1]
    monkeypatch.setattr(attached, "machine_memory", lambda: int(64e9))
    needed = estimate_memory(plan, "cpu").total
    text = memory_warning(plan, device)
    assert text.startswith("this run will probably not fit: a train step needs about")
    assert f"about {needed / 1e9:.1f} GB on a device (" in text
    assert "and this machine has 64.0 GB. Choose a smaller model" in text
    monkeypatch.setattr(attached, "machine_memory", lambda: int(needed) + 1)
    assert memory_warning(plan, device) == ""
    # Devices of a CPU share the memory of the machine.
    assert "on 2 devices" in memory_warning(plan, jax.local_devices()[:2])


def test_accelerators_have_memory_of_their_own():
    plan = step_plan(RECIPES["tiny"]())
    needed = int(estimate_memory(plan, "tpu").total)
    assert memory_warning(plan, [Accelerator(needed + 1)] * 8) == ""
    assert "a device has" in memory_warning(plan, [Accelerator(needed - 1)] * 8)
    assert memory_warning(plan, [Accelerator(None)]) == ""  # not reported


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_estimated(name):
    config = RECIPES["diffusion"]()
    moe = dataclasses.replace(config.model.moe, capacity=None, zero_computation=None)
    model = dataclasses.replace(config.model, moe=dataclasses.replace(moe, **METHODS[name].parts()))
    plan = step_plan(dataclasses.replace(config, model=model))
    assert memory_warning(plan, [Accelerator(1)]) and not memory_warning(plan, [Accelerator(2**40)])


def test_pretrain_warns_before_anything_is_computed(tmp_path, monkeypatch, caplog):
    class EndedError(Exception):
        pass

    def ended(*arguments, **fields):
        raise EndedError

    monkeypatch.setattr(attached, "machine_memory", lambda: 1000)
    monkeypatch.setattr(prepare, "CheckpointManager", ended)
    with pytest.raises(EndedError):
        Run(RECIPES["markov"](), tmp_path / "run").train()
    (record,) = [one for one in caplog.records if "will probably not fit" in one.getMessage()]
    assert record.levelname == "WARNING"
