# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Commands by which `.docs/systems.md` shows serving policies: each differs from the default."""

from __future__ import annotations

import json
import pathlib
import re
import shlex

import pytest

from experiments.serving.__main__ import main
from tests.support.runs import ROOT

TABLE = (ROOT / ".docs" / "systems.md").read_text().splitlines()


def rows_of(system: str, directory: pathlib.Path) -> dict[str, dict[str, float]]:
    """Run the command of a system as documented; return its rows by the policy of the row."""
    (line,) = (line for line in TABLE if line.startswith(f"| {system}"))
    found = re.search("`simulate ([^`]*)`", line)
    assert found is not None
    assert main(["simulate", "--run.directory", str(directory), *shlex.split(found[1])]) == 0
    rows = json.loads((directory / "summary.json").read_text())["rows"]
    return {row["policy"].split(maxsplit=1)[1]: row for row in rows}


def test_routing_by_prefix_finds_more_of_them(tmp_path):
    rows = rows_of("AIBrix (prefix-aware", tmp_path)
    assert rows["prefix_aware"]["cached"] > 1.2 * rows["least_loaded"]["cached"] > 0


def test_workflows_find_more_at_their_home_and_more_where_pages_pay_rent(tmp_path):
    rows = rows_of("SAGA", tmp_path)
    assert rows["saga:rent=0"]["cached"] > rows["least_loaded"]["cached"]
    assert rows["saga"]["cached"] > rows["saga:rent=0"]["cached"]


def test_swaps_in_groups_take_fewer_copies_and_nothing_is_computed_again(tmp_path):
    rows = rows_of("FastSwitch", tmp_path)
    single = rows["swap_groups:group=1,host=0"]
    assert rows["lru"]["copies"] == 0 < rows["lru"]["preempted"]
    assert 0 < rows["swap_groups"]["copies"] < 0.5 * single["copies"]
    assert rows["swap_groups"]["computed"] == single["computed"] < rows["lru"]["computed"]


@pytest.mark.parametrize(
    ("system", "policy"),
    [("AIBrix (autoscaler", "slo:interval=2"), ("POLCA", "polca:budget=0.4,interval=1")],
)
def test_scaling_saves_energy_within_the_objective(system, policy, tmp_path):
    rows = rows_of(system, tmp_path)
    assert rows[policy]["joules_per_token"] < 0.8 * rows["fixed"]["joules_per_token"]
    assert rows[policy]["within"] > 0.95


def test_twice_the_devices_are_faster(tmp_path):
    rows = rows_of("ElasticMoE", tmp_path)
    assert rows["elastic_experts:interval=1"]["tpot_p50"] < 0.9 * rows["fixed"]["tpot_p50"]


def test_what_a_policy_does_not_have_is_refused(tmp_path, capsys):
    for words, message in {
        ("--scaling", "slo:intervals=2"): "'intervals' is unknown: did you mean 'interval'?",
        ("--scaling", "slo:interval=x"): "'x' is no number",
        ("--scaling", "polca:clocks=1"): "'clocks' is unknown; known: budget, interval, hysteresis",
        ("--scaling", "slo:interval=0"): "scaling.interval=0.0 must be positive",
        ("--scaling", "sol:interval=2"): "scaling=sol:interval=2 is unknown",
        ("--preset", "tiny:x"): "preset=tiny:x is unknown",
        ("--pages", "0"): "pages=0 must be at least 1",
    }.items():
        with pytest.raises(SystemExit) as stop:
            main(["simulate", "--run.directory", str(tmp_path), *words])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
