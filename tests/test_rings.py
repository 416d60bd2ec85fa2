# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What runs when: rings of verticals, proofs that are due, and the budget of time for them."""

import json
import math
import os
import subprocess
import sys
import time

import pytest

from tests.conftest import take_part
from tests.support import costs, due, rotation, speed
from tests.support.due import Proof, in_order, next_batch, reason_due
from tests.support.source_tree import ROOT
from tests.support.verticals import VERTICALS, matches, vertical_of

CORE_FILE = "tests/jaxmoe/routing/test_gates.py"
RL_FILE = "tests/jaxmoe/contrib/rl/test_queue.py"
CORE = Proof(kind="slow", path=CORE_FILE, commit="a", seconds=30.0)
RL = Proof(kind="fast", path=RL_FILE, vertical="rl", commit="a", seconds=10.0)


@pytest.fixture(scope="module")
def files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return listed.stdout.split()


@pytest.mark.parametrize("name", VERTICALS)
def test_every_glob_of_a_vertical_matches_a_file(name, files):
    row = VERTICALS[name]
    globs = (*row.sources, *row.tests, *row.sockets)
    assert [glob for glob in globs if not any(matches(file, (glob,)) for file in files)] == []


def test_a_file_of_tests_belongs_to_one_vertical(files):
    tests = [file for file in files if file.startswith("tests/") and "/test_" in file]
    owners = {
        file: [n for n, row in VERTICALS.items() if matches(file, row.tests)] for file in tests
    }
    assert {file: names for file, names in owners.items() if len(names) > 1} == {}
    assert vertical_of(CORE_FILE) is None
    assert vertical_of(RL_FILE) == "rl"


def test_smoke_rows_run_in_the_ring_of_the_core():
    smoke = [row.smoke for row in VERTICALS.values()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--ring", "core"]
    command += [*smoke, *(name.partition("::")[0] for name in smoke)]
    variables = {**os.environ, "PYTEST_ADDOPTS": ""}
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    collected = [line for line in result.stdout.splitlines() if line.startswith("tests/")]
    assert sorted({*collected}) == sorted(smoke), result.stdout + result.stderr


class _Config:
    """What `take_part` asks of a run of pytest."""

    def __init__(self):
        self.hook, self.deselected = self, []

    def pytest_deselected(self, items):
        self.deselected += items


class _Row:
    """Row of a table of tests."""

    def __init__(self, nodeid, is_large):
        self.nodeid, self._is_large = nodeid, is_large

    def get_closest_marker(self, name):
        return name if self._is_large and name == "large" else None


def test_parts_of_what_is_large_are_disjoint_and_everything():
    large = [_Row(f"t.py::{table}[{n}]", True) for table in ("a", "b", "c") for n in range(7)]
    small = [_Row("t.py::small", False)]
    parts = []
    for number in range(3):
        config, items = _Config(), [*large, *small]
        take_part(config, items, f"{number}/3")
        parts.append([row for row in items if row not in small])
        assert items[-1] is small[0] and {*config.deselected} == {*large} - {*items}
        for table in ("a", "b", "c"):
            assert sum(f"::{table}[" in row.nodeid for row in items) in (2, 3)
    assert sorted(map(id, sum(parts, []))) == sorted(map(id, large))
    for wrong in ("3/3", "1", "a/b", "-1/3"):
        with pytest.raises(pytest.UsageError, match=f"--part {wrong} is none"):
            take_part(_Config(), [], wrong)


@pytest.mark.parametrize(
    ("proof", "changes", "reason"),
    [
        (CORE, {CORE_FILE}, due.OWN),
        (CORE, {"jaxmoe/routing/gates.py"}, due.OWN),
        (CORE, {"jaxmoe/layers/norms.py", "jaxmoe/routing/README.md"}, None),
        (CORE, {"tests/jaxmoe/routing/test_capacity.py"}, None),
        (RL, {"jaxmoe/contrib/rl/queue.py"}, due.OWN),
        (RL, {"jaxmoe/training/step.py"}, due.SOCKET),
        (RL, {"jaxmoe/routing/gates.py"}, None),
        (Proof(kind="slow", path="tests/faults/test_kills.py"), {"jaxmoe/run/run.py"}, due.SOCKET),
        (
            Proof(kind="slow", path="tests/experiments/test_serve.py"),
            {"experiments/serve.py"},
            due.OWN,
        ),
        (
            Proof(kind="slow", path="tests/experiments/test_convert_peft.py"),
            {"experiments/checkpoint/peft.py"},
            due.SOCKET,
        ),
    ],
)
def test_what_makes_a_proof_due(proof, changes, reason):
    assert reason_due(proof, frozenset(changes), age=3) == reason


def test_age_makes_a_proof_due_and_never_is_the_oldest():
    assert reason_due(CORE, frozenset(), age=due.TURN_COMMITS - 1) is None
    assert reason_due(CORE, frozenset(), age=due.TURN_COMMITS) == due.TURN
    assert reason_due(CORE, frozenset(), age=math.inf) == due.NEVER


def test_worth_is_change_then_socket_then_age():
    named = {
        letter: Proof(kind="slow", path=f"tests/{letter}.py", commit=letter, seconds=1.0)
        for letter in "abcdef"
    }
    changed = {"a": [], "b": ["tests/b.py"], "c": [], "d": [], "e": [], "f": ["tests/f.py"]}
    ages = {"a": 200, "b": 3, "c": math.inf, "d": 300, "e": 10, "f": 5}
    ordered = in_order(
        named.values(),
        lambda proof: frozenset(changed[proof.commit]),
        {proof.name: ages[letter] for letter, proof in named.items()},
    )
    assert [proof.commit for proof, _ in ordered] == ["f", "b", "c", "d", "a"]


def test_what_was_left_out_comes_before_what_ran():
    """Two equal proofs, one of which ran: the other is first at the next change of both."""
    older, newer = (Proof(kind="slow", path=f"tests/{n}.py", commit=n, seconds=9.0) for n in "xy")
    both = frozenset(("tests/x.py", "tests/y.py"))
    ordered = in_order([newer, older], lambda _: both, {older.name: 50, newer.name: 4})
    assert [proof for proof, _ in ordered] == [older, newer]


def test_batches_keep_to_the_budget_and_to_one_kind():
    rows = [
        (Proof(kind=kind, path=f"tests/{number}.py", seconds=seconds), due.OWN)
        for number, (kind, seconds) in enumerate(
            [("slow", 900.0), ("slow", 100.0), ("fast", 10.0), ("slow", 60.0), ("slow", 600.0)]
        )
    ]
    assert [p.path for p in next_batch(rows, 200.0, 1.0, 2)] == ["tests/1.py", "tests/3.py"]
    assert [p.path for p in next_batch(rows, 60.0, 1.0, 2)] == ["tests/2.py"]
    assert next_batch(rows, 20.0, 1.0, 2) == []
    assert [p.path for p in next_batch(rows, math.inf, 1.0, 2)] == ["tests/0.py"]
    slower = [p.path for p in next_batch(rows, 190.0, 2.0, 2)]
    assert slower == ["tests/1.py"]
    few = [(Proof(kind="slow", path=f"tests/{n}.py", seconds=40.0), due.OWN) for n in range(9)]
    sizes = [len(next_batch(few, left, 1.0, 2)) for left in (1000.0, 200.0, 130.0)]
    assert sizes == [9, 4, 2]  # of the budget, half


@pytest.mark.parametrize(("seconds", "number"), [(100.0, 4), (220.0, 2)])
def test_a_batch_that_takes_longer_makes_those_after_it_smaller(monkeypatch, seconds, number):
    clock, ran = [1000.0], []

    def run_batch(batch, workers, limit):
        ran.extend(batch)
        clock[0] += seconds * len(batch)
        return {}, set()

    monkeypatch.setattr(due, "run_batch", run_batch)
    monkeypatch.setattr(time, "time", lambda: clock[0])
    rows = [(Proof(kind="slow", path=f"tests/{n}.py", seconds=200.0), due.OWN) for n in range(9)]
    due.run_due(rows, due.History(), until=1500.0, factor=1.0, workers=2)
    assert len(ran) == number and clock[0] <= 1500.0


def test_the_budget_is_spent_and_what_is_left_out_is_said(monkeypatch, capsys):
    ran, clock = [], [1000.0]

    def run_batch(batch, workers, limit):
        ran.extend(proof.path for proof in batch)
        clock[0] += 100.0
        return {proof.path: 80.0 for proof in batch}, {"tests/1.py"} & {*ran[-len(batch) :]}

    monkeypatch.setattr(due, "run_batch", run_batch)
    monkeypatch.setattr(time, "time", lambda: clock[0])
    rows = [
        (Proof(kind="slow", path=f"tests/{number}.py", seconds=400.0), due.OWN)
        for number in range(5)
    ]
    history = due.History()
    passed, failures = due.run_due(rows, history, until=1450.0, factor=1.0, workers=2)
    assert ran == [f"tests/{number}.py" for number in range(3)]
    assert failures == ["slow tests/1.py"]
    assert passed["slow tests/0.py"] == {"commit": history.head, "seconds": 80.0}
    written = capsys.readouterr().out
    assert "2 proofs passed, 1 failed, 2 due and left out" in written
    assert "left out: slow tests/4.py (changed, about 400 s)" in written
    assert due.adopted(written) == passed


def test_the_record_is_written_as_it_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(due, "RECORD", tmp_path / "proofs.json")
    record = {"slow tests/b.py": {"commit": "abc", "seconds": 1.5}, "fast tests/a.py": {}}
    due.write_record(record)
    assert due.recorded() == record
    assert json.loads(due.RECORD.read_text()) == record


def test_a_commit_that_is_not_in_the_history_never_passed():
    history = due.History()
    assert history.age("0123456789ab") == math.inf
    assert history.age(history.head) == 0
    assert isinstance(history.changes("0123456789ab"), frozenset)


@pytest.mark.parametrize(
    ("seconds", "minutes"), [(1.0, 40), (2.5, 40), (3.75, 60), (5.0, 70), (60.0, 70)]
)
def test_a_slow_machine_has_a_larger_budget_up_to_its_bound(seconds, minutes):
    assert speed.budget_minutes(40, 70, seconds) == minutes


def test_packages_of_files():
    assert rotation.package_of("experiments/serve.py") == "experiments/serve"
    assert rotation.package_of("experiments/checkpoint/verify.py") == "experiments/checkpoint"
    assert rotation.package_of("jaxmoe/run/serving.py") == "jaxmoe/run/serving.py"
    assert rotation.package_of("jaxmoe/run/reporting/report.py") == "jaxmoe/run"
    assert rotation.package_of("jaxmoe/routing/routers/token_choice/kmeans.py") == "jaxmoe/routing"
    assert rotation.package_of(CORE_FILE) == "jaxmoe/routing"


def test_costs_are_summed_by_group():
    cost = dict.fromkeys(costs.FIELDS, 1.0)
    tests = {"tests/a/test_b.py::one": cost, "tests/a/test_b.py::two": cost}
    sums = costs.summed(tests, lambda name: name.partition("::")[0])
    assert sums["tests/a/test_b.py"]["tests"] == 2
    assert sums["tests/a/test_b.py"]["wall"] == 2.0
    lines = costs.table("file", sums, most=1)
    assert lines[-1].startswith("| sum | 2 | 2 |")
