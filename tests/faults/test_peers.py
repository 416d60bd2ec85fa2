# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Two processes of a run: one is killed, stopped, raises, gets a signal, or has another config."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.cli.flags import ExitCode
from tests.support.ports import free_port
from tests.support.runs import ROOT, flags

HEARTBEAT = 10
WAITS = ("--processes.heartbeat", str(HEARTBEAT), "--execution.mesh.data", "4")
RUN = ("--tracking.print_every", "1", "--evaluation.every", "0", "--checkpoint.every", "0")
MANY = 10_000


class Pair:
    """Two processes, their output and its times."""

    def __init__(self, directory, common, own=((), ()), script=None):
        port = free_port()
        self.logs = [directory / f"process{index}.log" for index in range(2)]
        self.processes = []
        run = ["-c", script] if script else ["-m", "experiments.pretrain"]
        for index in range(2):
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2"
                " --xla_backend_optimization_level=0",  # it compiles much and computes little
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(index),
            }
            command = [sys.executable, *run, *common, *own[index]]
            with self.logs[index].open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def text(self, index):
        return self.logs[index].read_text()

    def until(self, words, index=0):
        """Wait for words in the output of a process."""
        while words not in self.text(index):
            assert self.processes[index].poll() is None, self.text(0) + self.text(1)
            time.sleep(0.05)

    def code(self, index, seconds=600):
        return self.processes[index].wait(timeout=seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number"), [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)]
)
def test_killed_or_stopped_peer_ends_the_other(tmp_path, victim, number):
    """The other is out within the heartbeat and 5 s, and names it; process 0 takes the service that
    knows names with it, and JAX says that it has gone, or Gloo that half of a message has."""
    waits = ("--processes.watchdog", "8") if number == signal.SIGSTOP else ()
    with Pair(tmp_path, flags(tmp_path / "run", MANY, *WAITS, *RUN, *waits)) as pair:
        pair.until("step=5/")
        # What ends the other is the signal, and not a fault between the two.
        assert pair.processes[1 - victim].poll() is None, pair.text(1 - victim)
        pair.processes[victim].send_signal(number)
        began = time.monotonic()
        code = pair.code(1 - victim)
        seconds = time.monotonic() - began
    text = pair.text(1 - victim)
    assert seconds < HEARTBEAT + 5, text
    if victim == 0:
        assert code == -signal.SIGABRT, text
        assert "the JAX distributed service" in text or "Received data size" in text
        return
    assert code in (ExitCode.LOST, ExitCode.HUNG), text
    assert "process 1 is lost: has been silent" in text or "process 1 has been silent" in text


RAISES = """
import os, sys
from experiments import pretrain
from jaxmoe.run.reporter import Reporter

trained = Reporter.log_steps

def trained_and_raises(self, report):
    trained(self, report)
    if os.environ["JAX_PROCESS_ID"] == "1" and report.steps[-1] >= 5:
        raise LookupError("broken on purpose")

Reporter.log_steps = trained_and_raises
sys.exit(pretrain.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_error_in_one_process_ends_both_and_is_shown_once(tmp_path):
    with Pair(tmp_path, flags(tmp_path / "run", MANY, *WAITS, *RUN), script=RAISES) as pair:
        assert pair.code(1) == 1, pair.text(1)
        began = time.monotonic()
        assert pair.code(0) == ExitCode.LOST, pair.text(0)
        assert time.monotonic() - began < 10
    assert "process 1 is lost: LookupError: ended with 1" in pair.text(0)
    assert (pair.text(0) + pair.text(1)).count("LookupError: broken on purpose") == 1


@pytest.mark.slow
def test_a_signal_to_one_process_saves_one_step_of_both(tmp_path):
    with Pair(tmp_path, flags(tmp_path / "run", MANY, *WAITS, *RUN)) as pair:
        pair.until("step=5/")
        pair.processes[1].send_signal(signal.SIGTERM)
        began = time.monotonic()
        codes = [pair.code(0), pair.code(1)]
        assert codes == [ExitCode.PREEMPTED] * 2, pair.text(0) + pair.text(1)
        assert time.monotonic() - began < 60
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 5 <= summary["checkpoint_step"] == summary["steps"] < MANY
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert str(summary["steps"]) in saved


@pytest.mark.slow
def test_processes_of_another_config_stop_before_they_compile(tmp_path):
    own = ((), ("--training.seed", "1"))
    with Pair(tmp_path, flags(tmp_path / "run", 4, *WAITS, *RUN), own) as pair:
        assert [pair.code(0), pair.code(1)] == [ExitCode.BAD_CONFIGURATION] * 2
        for index in range(2):
            assert "1 of 2 processes were not started like process 0" in pair.text(index)
            assert "process 1: training.seed is 1, on process 0 0" in pair.text(index)
            assert "compiled in" not in pair.text(index)


ABSENT = """
import os, sys, time
from sharding.coordination import barrier
from sharding.distributed import start_processes

start_processes()
barrier("the start", 60)
if os.environ["JAX_PROCESS_ID"] == "0":
    try:
        barrier("the first step", 2)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
else:
    time.sleep(4)
os._exit(0)
"""


@pytest.mark.slow
def test_absent_process_is_named(tmp_path):
    with Pair(tmp_path, (), script=ABSENT) as pair:
        assert pair.code(0) == 0
    wanted = "AbsentError process 1 did not come to 'the first step' within 2 s"
    assert wanted in pair.text(0)
