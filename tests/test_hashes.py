# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The hashes that prove refactorings: repeatable, sensitive to one rounding, and complete."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.routing import GATES
from tests.support.hashes import __main__ as command
from tests.support.hashes import digests, environment, files
from tests.support.hashes.rows import table
from tests.support.hashes.workers import compute
from tests.test_architecture import REGISTRIES, _registry

CHEAP = ("data/markov", "simulated/cache_lru", "router/forced_balance")
GATE = "gate/softmax"

AREAS = {
    "jaxmoe.adapters:ADAPTERS": "adapter/",
    "jaxmoe.training.parts.average:AVERAGES": "run/average_",
    "jaxmoe.data:DATA_SOURCES": "data/",
    "jaxmoe.data.tokenizer:TOKENIZERS": "tokenizer/",
    "jaxmoe.layers.feed_forwards:FEED_FORWARDS": "feed_forward/",
    "jaxmoe.layers.mixers:MIXERS": "mixer/",
    "jaxmoe.layers.residual:RESIDUALS": "residual/",
    "jaxmoe.optim.schedules:SCHEDULES": "schedule/",
    "jaxmoe.contrib.placement:PLACERS": "placer/",
    "jaxmoe.training.replicas:REPLICAS": "replicas/",
    "jaxmoe.routing:BALANCERS": "balancer/",
    "jaxmoe.routing:BIASES": "bias/",
    "jaxmoe.routing:CAPACITIES": "capacity/",
    "jaxmoe.routing:GATES": "gate/",
    "jaxmoe.routing:METHODS": "method/",
    "jaxmoe.routing:ROUTERS": "router/",
    "jaxmoe.scaling:PARAMETERIZATIONS": "parameterization/",
    "jaxmoe.contrib.serving_lab.caches:ITEM_CACHES": "simulated/cache_",
    "jaxmoe.contrib.serving_lab.batching:SIMULATED_BATCHING": "simulated/batching_",
    "jaxmoe.serve.policies.batching:BATCHING": "simulated/batching_",
    "jaxmoe.contrib.fleet.dispatch:DISPATCH": "simulated/dispatch_",
    "jaxmoe.serve.policies.retention:RETENTION": "simulated/retention_",
    "jaxmoe.contrib.fleet.scaling:SCALING": "simulated/scaling_",
    "jaxmoe.contrib.serving_lab.simulation.workload:WORKLOADS": "simulated/workload_",
    "jaxmoe.training:OBJECTIVES": "objective/",
    "jaxmoe.training.estimators:ESTIMATORS": "estimator/",
    "sharding.expert_parallel:Dispatcher": "dispatcher/",
    "sharding.pipeline:PipelineOrder": "step/",
    "sharding.sequence_parallel:SequenceParallelism": "sequence_parallel/",
}
"""Registries whose members have a row each, and what the names of these rows begin with."""

WITHOUT_A_ROW = {"data/huggingface", "data/tokenizer_only"}
"""A source in a package that is not installed, and one without rows."""


def test_rows_computed_twice_are_equal_and_an_error_is_no_hash():
    first, second = ({name: compute(name) for name in CHEAP} for _ in range(2))
    assert files.errors(first) == [] and files.differences(first, second) == []
    failed = first | {CHEAP[0]: {files.ERROR: "ValueError: no"}}
    assert files.differences(failed, failed) == [
        f"{CHEAP[0]}: OLD failed (ValueError: no), NEW failed (ValueError: no)"
    ]


def test_one_rounding_in_a_gate_is_named_with_its_row_and_parts(monkeypatch):
    before = {name: compute(name) for name in (GATE, CHEAP[2])}
    assert files.errors(before) == []
    gate = type(GATES["softmax"]().build())
    weights = gate.__call__

    def rounded(self, selection, scores):
        return weights(self, selection, scores) * jnp.float32(1 + 2**-23)

    monkeypatch.setattr(gate, "__call__", rounded)
    (line,) = files.differences(before, {name: compute(name) for name in before})
    assert line.startswith(f"{GATE}: ") and "gradients" in line and "loss" in line


@pytest.mark.parametrize("part", ["params", "optimizer state", "router state", "rest of the state"])
def test_one_bit_of_a_state_changes_the_hash_of_its_part_alone(part):
    def state(change=""):
        leaf = np.ones(3, np.float32)
        changed = np.array([1, 1, np.nextafter(np.float32(1), np.float32(2))], np.float32)
        names = ("params", "optimizer state", "router state", "rest of the state")
        params, moments, bias, norms = (changed if name == change else leaf for name in names)
        fields = {"params": {"w": params}, "opt_state": (moments,), "router_state": {"b": bias}}
        return digests.parts_of_state(fields | {"recent_norms": norms, "step": 2})

    found, wanted = state(part), state()
    assert [name for name in wanted if found[name] != wanted[name]] == [part]


def test_hashes_do_not_depend_on_the_place_of_a_field_but_on_paths_of_parameters():
    one = {"params": {"a": 1.0, "b": 2.0}, "opt_state": (), "average": np.ones(2), "adapter": None}
    moved = {"params": {"b": 2.0, "a": 1.0}, "opt_state": (), "parts": {"mean": np.ones(2)}}
    assert digests.parts_of_state(one) == digests.parts_of_state(moved)
    renamed = one | {"params": {"a": 1.0, "c": 2.0}}
    assert digests.parts_of_state(one) != digests.parts_of_state(renamed)


def test_collectives_count_by_kind_size_groups_and_executions():
    program = """HloModule m
ENTRY %main (x: f32[{size}]) -> f32[{size}] {{
  %x = f32[{size}]{{0}} parameter(0)
  ROOT %{name} = f32[{size}]{{0}} all-gather(%x), replica_groups={groups}, dimensions={{0}}
}}
"""

    def found(name="a", size=8, groups="{{0,1},{2,3}}"):
        return digests.digest_of_collectives(program.format(name=name, size=size, groups=groups))

    assert found() == found("renamed") != found(size=16) != found(groups="{{0,2},{1,3}}")
    assert len({found(), found(size=16), found(groups="{{0,2},{1,3}}")}) == 3


def test_commands_take_hashes_in_processes_and_name_what_differs(tmp_path, capsys):
    path = tmp_path / "new.json"
    words = [sys.executable, "-m", "tests.support.hashes", "take", str(path), "--workers", "1"]
    done = subprocess.run(
        [*words, "--rows", "simulated/cache_lr*", "data/markov"],
        cwd=environment.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    described, rows = files.read(path)
    assert set(rows) == {"simulated/cache_lru", "data/markov"}
    assert described == json.loads(path.read_text())["environment"] == environment.describe()
    changed = {"data/markov": rows["data/markov"] | {"batches": "0"}, "gate/none": {"loss": "1"}}
    files.write(tmp_path / "old.json", described, changed)
    assert command.main(["compare", str(path), str(path)]) == 0
    capsys.readouterr()
    assert command.main(["compare", str(tmp_path / "old.json"), str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "data/markov: batches",
        "gate/none: only in OLD",
        "simulated/cache_lru: only in NEW",
        "3 rows differ, 0 are equal",
    ]


@pytest.mark.parametrize("registry", AREAS)
def test_every_member_of_a_registry_has_a_row(registry):
    wanted = {AREAS[registry] + name for name in _registry(registry)} - WITHOUT_A_ROW
    assert wanted <= set(table())


def test_every_registry_of_the_library_is_looked_at():
    elsewhere = {
        "experiments.launch.config:CLUSTERS": "writes scripts",
        "jaxmoe.checkpoint.huggingface.family:FAMILIES": "golden files of each",
        "jaxmoe.contrib.levels:ASSIGNERS": "sequence_parallel/levels",
        "jaxmoe.layers.feed_forwards:ACTIVATIONS": "options of published models",
        "jaxmoe.layers.norms:NORMS": "options of published models",
        "jaxmoe.optim:OPTIMIZERS": "parameterization/ and optimizer/",
        "jaxmoe.precision:MATMULS": "step/",
        "jaxmoe.contrib.rl.rewards:REWARDS": "run/reinforced",
        "jaxmoe.serve.http.reasoning:REASONING_PARSERS": "text",
        "jaxmoe.serve.http.tools:TOOL_PARSERS": "text",
        "jaxmoe.tracking:TRACKERS": "draws",
        "sharding.products.collective:TensorProductsConfig": "execution/",
        "sharding.sequence_parallel:CacheReading": "generated/",
    }
    assert set(REGISTRIES) == set(AREAS) | set(elsewhere)
