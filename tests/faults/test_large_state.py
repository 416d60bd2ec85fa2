# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A state that takes 60% of a device's memory trains, is killed, resumes and ends bitwise.

Memory is what arrays that are alive take, sampled every millisecond: temporaries of a compiled
step are XLA's, and a CPU has no limit for them.
"""

import json
import signal
import sys

import numpy as np
import pytest

from tests.support.runs import flags, saved_leaves, start_run, written_by

pytestmark = [pytest.mark.slow, pytest.mark.trains]

STEPS = 12
SHARE = 0.6

SCRIPT = """
import json, os, pathlib, signal, sys, threading, time
import jax
from jaxmoe.checkpoint import capture
from experiments import pretrain

limit, kill_after, result, *arguments = sys.argv[1:]
peak = 0

def sample():
    global peak
    buffers = {}  # a shard of an array is an array of the same buffer
    for array in jax.live_arrays():
        try:
            buffers[array.unsafe_buffer_pointer()] = array.nbytes
        except (RuntimeError, ValueError):  # deleted, or a key
            pass
    peak = max(peak, sum(buffers.values()))

def watch():
    while True:
        sample()
        if kill_after and pathlib.Path(kill_after).exists():
            pathlib.Path(result).write_text(json.dumps(peak))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)

threading.Thread(target=watch, daemon=True).start()
if limit != "none":
    capture._stats = lambda device: {"bytes_limit": int(limit), "peak_bytes_in_use": peak}
pretrain.main(arguments)
pathlib.Path(result).write_text(json.dumps(peak))
"""

LARGER = ("--model.embed_dim", "128", "--model.moe.expert_dim", "128")


def _run(directory, limit: str, kill_after: str = "") -> tuple[int, str, int]:
    """Return the exit code, the output and the most bytes of live arrays of a run's process."""
    result = directory.parent / f"{directory.name}.peak"
    given = flags(directory, STEPS, *LARGER, "--checkpoint.every", "4", "--evaluation.every", "0")
    process = start_run([limit, kill_after, str(result), *given], script=SCRIPT)
    (output,) = written_by(process)
    return process.returncode, output, json.loads(result.read_text())


def test_a_state_of_60_percent_of_the_memory_trains_is_killed_and_ends_bitwise(tmp_path):
    code, output, free = _run(tmp_path / "whole", "none")
    assert code == 0, output
    expected = saved_leaves(tmp_path / "whole", STEPS)
    size = sum(leaf.nbytes for leaf in expected.values())
    limit = int(size / SHARE)
    assert free > limit, "a run without the limit shows that the samples see a second state"

    bounded = tmp_path / "bounded"
    code, output, first = _run(bounded, str(limit), str(bounded / "checkpoints" / "8"))
    assert code == -signal.SIGKILL, output
    code, output, second = _run(bounded, str(limit))
    assert code == 0, output
    assert "step 8" in output, output
    print(f"state {size:,} bytes; live {free:,}, {first:,}, {second:,}", file=sys.stderr)
    assert size <= first <= limit and size <= second <= limit
    found = saved_leaves(bounded, STEPS)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
