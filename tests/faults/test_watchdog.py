# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The watchdog of one process, its timeouts, and the comparison of configs at the start."""

import dataclasses
import re
import subprocess
import sys
import time

import pytest

from experiments.cli.flags import ExitCode
from jaxmoe.resilience import agreement
from jaxmoe.resilience.processes_config import ProcessesConfig
from jaxmoe.run.config import PretrainConfig
from tests.support.runs import ROOT

# A kind of work that is new may take longer, one that is known may not. Beats are timed here,
# where no annotation is checked at run time.
HANGING = """
import time
from experiments.cli.exit import exit_code
from jaxmoe.resilience.processes_config import ProcessesConfig
from jaxmoe.resilience.watchdog import Watchdog

def stands_still():
    time.sleep(60)

with Watchdog(ProcessesConfig(watchdog=1, first=30), exit_code) as watchdog:
    watchdog.beat("step", 1)
    time.sleep(2)
    print("still here", flush=True)
    seconds = []
    for _ in range(50):
        began = time.perf_counter()
        for step in range(1000):
            watchdog.beat("step", step)
        seconds.append((time.perf_counter() - began) / 1000)
    print("a beat costs", "little" if min(seconds) < 1e-6 else min(seconds), flush=True)
    watchdog.beat("step", 2)
    stands_still()
"""


def test_hung_process_ends_with_its_stacks():
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGING], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == ExitCode.HUNG, done.stderr
    assert done.stdout == "still here\na beat costs little\n"
    assert re.search(r"error: nothing has moved for 1 s: step \(step 2\) for 1\.\d s", done.stderr)
    assert "stands_still" in done.stderr
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heartbeat": 0}, "processes.heartbeat=0 must be at least 1 second"),
        ({"barrier": 0}, "processes.barrier=0 must be at least 1 second"),
        ({"watchdog": -1}, r"processes.watchdog=-1 must be 0 \(never\) or more"),
        ({"watchdog": 9, "first": 8}, "processes.watchdog=9 must not exceed processes.first=8"),
    ],
)
def test_invalid_timeouts_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ProcessesConfig(**given)


def test_processes_compare_config_code_and_versions(monkeypatch):
    config = PretrainConfig()
    first = agreement.facts(config)
    assert agreement.disagreement(first, agreement.facts(config)) == []
    tracking = dataclasses.replace(config.tracking, console="none", sample_length=0)
    own = dataclasses.replace(config, tracking=tracking)
    assert agreement.disagreement(first, agreement.facts(own)) == []
    training = dataclasses.replace(config.training, seed=1, steps=601)
    monkeypatch.setattr(agreement, "code_hash", lambda: "another")
    other = agreement.facts(dataclasses.replace(config, training=training))
    lines = agreement.disagreement(first, other)
    assert "training.seed is 1, on process 0 0" in lines
    assert any("software.code is" in line and "another" in line for line in lines), lines
    assert len(lines) == 3
