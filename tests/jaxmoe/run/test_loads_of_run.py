# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Loads of the experts of a run, as the simulator takes them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxmoe.contrib.serving_lab.timing import loads_of_run
from jaxmoe.run.directory import RunDirectory
from jaxmoe.tracking import RouterLoadRecorder
from tests.support.simulated import COST, SIZES


def test_loads_of_a_run_are_the_mean_of_its_last_records(tmp_path):
    assert loads_of_run(str(tmp_path), SIZES) == ()
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (120, SIZES.moe_layers, SIZES.num_experts)).astype(float)
    recorder = RouterLoadRecorder(RunDirectory(str(tmp_path)).router_file)
    for step, one in enumerate(counts):
        recorder.record(step, one)
    recorder.save()
    found = loads_of_run(str(tmp_path), SIZES)
    shares = counts / counts.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(found, shares[-100:].mean(axis=0), rtol=1e-5)
    known = dataclasses.replace(COST, loads=found)
    assert 0 < known.distinct_experts(2) < COST.distinct_experts(2)
    other = dataclasses.replace(SIZES, num_experts=SIZES.num_experts + 1)
    assert loads_of_run(str(tmp_path), other) == ()


@pytest.mark.parametrize("tokens", [1, 7])
def test_an_expert_that_is_always_chosen_is_read_once(tokens):
    loads = ((1.0 / SIZES.top_k,) * SIZES.top_k + (0.0,) * (SIZES.num_experts - SIZES.top_k),)
    assert dataclasses.replace(COST, loads=loads).distinct_experts(tokens) == SIZES.top_k
