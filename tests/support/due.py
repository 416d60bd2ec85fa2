# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the proofs that are due, the most worth first, until a budget of time is spent.

    python -m tests.support.due                 what is due, without a budget (`make test-due`)
    python -m tests.support.due --until TIME    the same until a time, in seconds since 1970 (CI)
    python -m tests.support.due --list          only says what is due, and why
    python -m tests.support.due --record        also writes what passed into tests/proofs.json
    python -m tests.support.due --adopt LOG     writes what a log of another run says passed

A proof is what `make test` leaves out of one file of tests: `fast` the rows of a vertical, `slow`
the long proofs that compile, `trains` those that compute. It is due when its sources or its file
changed since it passed last, when a socket did that it acts through, when it never passed, or when
so many commits have passed that it is its turn. tests/proofs.json says for each at which commit it
passed last and how long it took at full speed. What is left out stays due, and grows older.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping

from tests.support import speed
from tests.support.rotation import package_changes, sockets_of
from tests.support.verticals import VERTICALS, matches

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "proofs.json"
TURN_COMMITS = 150
RECENT_COMMITS = 10
BATCH_SECONDS = 300.0
LAST_BATCH_SECONDS = 60.0
START_SECONDS = 20.0
"""Processes start and collect before the first test of a batch."""
UNKNOWN_SECONDS = {"fast": 10.0, "slow": 60.0, "trains": 60.0}

CHOICES = {
    "fast": ("--dist", "loadfile", "--ring", "verticals", "-m", "not slow"),
    "slow": ("-m", "slow and not trains"),
    "trains": ("-m", "slow and trains"),
}
OWN, SOCKET, NEVER, TURN = "changed", "its socket changed", "never passed", "its turn"
_PASSED = re.compile(r"proof passed: (fast|slow|trains) (\S+) ([\d.]+) s at ([0-9a-f]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """What `make test` leaves out of a file of tests.

    Attributes:
        kind: `fast`, `slow` or `trains`.
        path: File of tests, relative to the root.
        vertical: That it belongs to, None for the core.
        commit: At which it passed last, None for never.
        seconds: Of one worker at full speed, None where it is not known.
    """

    kind: str
    path: str
    vertical: str | None = None
    commit: str | None = None
    seconds: float | None = None

    @property
    def name(self) -> str:
        """Return its key in the record."""
        return f"{self.kind} {self.path}"

    def seconds_here(self, factor: float) -> float:
        """Return the seconds that one worker is expected to take on this machine."""
        seconds = UNKNOWN_SECONDS[self.kind] if self.seconds is None else self.seconds
        return seconds * factor


def reason_due(proof: Proof, changes: frozenset[str], age: float) -> str | None:
    """Return why a proof is due, None if it is not.

    Args:
        proof: The proof.
        changes: Files that changed since it passed; for one that never did, lately.
        age: Commits since it passed, infinity for never.
    """
    if proof.path in changes:
        return OWN
    row = VERTICALS.get(proof.vertical or "")
    if row is not None:
        if any(matches(path, row.sources) for path in changes):
            return OWN
        if any(matches(path, row.sockets) for path in changes):
            return SOCKET
    else:
        if package_changes(proof.path, changes):
            return OWN
        if sockets_of(proof.path, changes):
            return SOCKET
    if math.isinf(age):
        return NEVER
    return TURN if age >= TURN_COMMITS else None


def in_order(
    proofs: Iterable[Proof],
    changes_of: Callable[[Proof], frozenset[str]],
    ages: Mapping[str, float],
) -> list[tuple[Proof, str]]:
    """Return the due proofs with their reasons, the most worth first.

    Those of changed files come first, then those of changed sockets, then those that never passed
    or whose turn it is; among equals the one that has not run for longest, and then the shortest.

    Args:
        proofs: All of them.
        changes_of: The files that changed since a proof passed.
        ages: Commits since each passed, by name; infinity for never.
    """
    ranks = {OWN: 0, SOCKET: 1, NEVER: 2, TURN: 2}
    due = [
        (proof, reason)
        for proof in proofs
        if (reason := reason_due(proof, changes_of(proof), ages[proof.name])) is not None
    ]
    return sorted(
        due,
        key=lambda row: (
            ranks[row[1]],
            -ages[row[0].name],
            row[0].seconds_here(1.0),
            row[0].name,
        ),
    )


def next_batch(
    due: list[tuple[Proof, str]], seconds_left: float, factor: float, workers: int
) -> list[Proof]:
    """Return the proofs to run next: of the kind of the first that fits, in order.

    Args:
        due: In order of worth.
        seconds_left: Of the budget.
        factor: Of this machine's seconds to those at full speed.
        workers: Processes.

    Returns:
        Proofs that are expected to take BATCH_SECONDS or half of the budget together, or less, or
        one; none where nothing fits.
    """
    batch: list[Proof] = []
    total = 0.0
    # What takes twice as long as expected still ends in time.
    most = min(BATCH_SECONDS, max(LAST_BATCH_SECONDS, seconds_left / 2))
    for proof, _ in due:
        if batch and proof.kind != batch[0].kind:
            continue
        seconds = proof.seconds_here(factor)
        # A file of fast tests stays with one worker.
        alone = seconds if proof.kind == "fast" else seconds / workers
        wall = START_SECONDS * factor + max(alone, (total + seconds) / workers)
        if wall > seconds_left or (batch and wall > most):
            continue
        batch.append(proof)
        total += seconds
    return batch


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class History:
    """What changed since a commit, and how long ago it was."""

    def __init__(self) -> None:
        self.head = _git("rev-parse", "--short=12", "HEAD").strip()
        self._changes: dict[str, frozenset[str]] = {}
        self._ages: dict[str, float] = {}

    def age(self, commit: str | None) -> float:
        """Return the commits since one; infinity where it is None or not in the history."""
        if commit is None:
            return math.inf
        if commit not in self._ages:
            known = ("merge-base", "--is-ancestor", commit, "HEAD")
            is_known = subprocess.run(["git", "-C", str(ROOT), *known], capture_output=True)
            self._ages[commit] = (
                int(_git("rev-list", "--count", f"{commit}..HEAD"))
                if is_known.returncode == 0
                else math.inf
            )
        return self._ages[commit]

    def changes(self, commit: str | None) -> frozenset[str]:
        """Return the files that changed since a commit; lately, where it is not in the history."""
        since = commit if not math.isinf(self.age(commit)) else f"HEAD~{RECENT_COMMITS}"
        assert since is not None
        if since not in self._changes:
            self._changes[since] = frozenset(_git("diff", "--name-only", since).split())
        return self._changes[since]


def recorded() -> dict[str, dict]:
    """Return the record: commit and seconds by name of the proof."""
    return json.loads(RECORD.read_text(encoding="ascii")) if RECORD.exists() else {}


def write_record(record: Mapping[str, dict]) -> None:
    """Write the record."""
    lines = [f"{json.dumps(name)}: {json.dumps(record[name])}" for name in sorted(record)]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")


def collected_proofs(record: Mapping[str, dict]) -> list[Proof]:
    """Return the proofs of all files of tests."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "proofs.json"
        options = ("--collect-only", "-q", "-m", "slow or not slow", "--proofs", str(path))
        command = [sys.executable, "-m", "pytest", *options]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if result.returncode or not path.exists():
            raise SystemExit(f"the tests cannot be collected:\n{result.stdout[-3000:]}")
        rows = json.loads(path.read_text())
    return [
        Proof(
            kind=row["kind"],
            path=row["path"],
            vertical=row["vertical"],
            **record.get(f"{row['kind']} {row['path']}", {}),
        )
        for row in rows
    ]


def run_batch(batch: list[Proof], workers: int, limit: float) -> tuple[dict[str, float], set[str]]:
    """Run proofs of one kind.

    Returns:
        The seconds of one worker by path, and the paths in which something failed.
    """
    kind = batch[0].kind
    options = list(CHOICES[kind])
    options[-1] += " and not large and not accelerator"
    with tempfile.TemporaryDirectory() as folder:
        costs = pathlib.Path(folder) / "costs.json"
        more = ("-n", str(workers), "-q", "--costs", str(costs), *(proof.path for proof in batch))
        command = [sys.executable, "-m", "pytest", *options, *more]
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            print(f"a batch took longer than {limit:.0f} s and was ended", flush=True)
            return {}, {proof.path for proof in batch}
        result = json.loads(costs.read_text()) if costs.exists() else {"tests": {}, "failed": []}
    seconds: dict[str, float] = collections.Counter()
    for test, cost in result["tests"].items():
        seconds[test.partition("::")[0]] += cost["wall"]
    failed = {test.partition("::")[0] for test in result["failed"]}
    if code not in (0, 5) and not failed:
        failed = {proof.path for proof in batch}
    return seconds, failed


def run_due(
    due: list[tuple[Proof, str]], history: History, *, until: float, factor: float, workers: int
) -> tuple[dict[str, dict], list[str]]:
    """Run what is due until a time, and print what passed, failed and was left out.

    Returns:
        Rows of the record of what passed, and the names of what failed.
    """
    passed: dict[str, dict] = {}
    failures: list[str] = []
    slowest = 1.0
    while batch := next_batch(due, until - time.time(), factor * slowest, workers):
        expected = sum(proof.seconds_here(factor) for proof in batch) / workers
        began = time.time()
        print(f"{len(batch)} proofs, {batch[0].kind}: about {expected:.0f} s", flush=True)
        seconds, failed = run_batch(batch, workers, limit=2 * expected + 600)
        took = time.time() - began - START_SECONDS * factor
        slowest = max(slowest, took / max(expected, LAST_BATCH_SECONDS))
        for proof in batch:
            if proof.path in failed:
                failures.append(proof.name)
                print(f"proof failed: {proof.name}", flush=True)
                continue
            at_full_speed = round(seconds.get(proof.path, 0.0) / factor, 1)
            passed[proof.name] = {"commit": history.head, "seconds": at_full_speed}
            print(f"proof passed: {proof.name} {at_full_speed} s at {history.head}", flush=True)
        names = {proof.name for proof in batch}
        due = [row for row in due if row[0].name not in names]
    print(f"{len(passed)} proofs passed, {len(failures)} failed, {len(due)} due and left out")
    for proof, reason in due:
        print(f"left out: {proof.name} ({reason}, about {proof.seconds_here(factor):.0f} s)")
    return passed, failures


def adopted(log: str) -> dict[str, dict]:
    """Return the rows of the record that a log says passed."""
    return {
        f"{kind} {path}": {"commit": commit, "seconds": float(seconds)}
        for kind, path, seconds, commit in _PASSED.findall(log)
    }


def main() -> None:
    """Run, list or record what is due."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--until", type=float, default=math.inf, help="seconds since 1970")
    parser.add_argument("--list", action="store_true", help="say what is due, and run nothing")
    parser.add_argument("--record", action="store_true", help="write tests/proofs.json")
    parser.add_argument("--adopt", type=pathlib.Path, help="log of another run")
    parser.add_argument("--workers", type=int, default=int(os.environ.get("WORKERS", "2")))
    arguments = parser.parse_args()
    record = recorded()
    if arguments.adopt:
        write_record({**record, **adopted(arguments.adopt.read_text(errors="replace"))})
        return
    history = History()
    proofs = collected_proofs(record)
    ages = {proof.name: history.age(proof.commit) for proof in proofs}
    due = in_order(proofs, lambda proof: history.changes(proof.commit), ages)
    if arguments.list:
        for proof, reason in due:
            print(f"{proof.name} ({reason}, about {proof.seconds_here(1.0):.0f} s)")
        print(f"{len(due)} of {len(proofs)} proofs are due")
        return
    factor = max(0.25, speed.measured_seconds() / speed.FULL_SPEED_SECONDS)
    passed, failures = run_due(
        due, history, until=arguments.until, factor=factor, workers=arguments.workers
    )
    if arguments.record:
        names = {proof.name for proof in proofs}
        kept = {name: row for name, row in {**record, **passed}.items() if name in names}
        write_record(kept)
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
