# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run whose optimiser state lies in files is killed within an update, and goes on bitwise."""

import numpy as np
import pytest

from experiments import pretrain
from experiments.cli.flags import ExitCode
from jaxmoe.contrib.offload.part_files import PartFiles
from tests.support.runs import flags, logged_losses, saved_leaves

STEPS, EVERY = 4, 2


class Death(BaseException):
    """An exception that nothing catches."""


def command(run, memory):
    every = ("--checkpoint.every", str(EVERY), "--tracking.print_every", "1")
    quiet = ("--evaluation.every", "0", "--tracking.sample_length", "0")
    offload = ("--execution.offload.optimizer", memory) if memory != "device" else ()
    return flags(run, STEPS, *every, *quiet, *offload)


def die_within(run, write: int) -> None:
    """Start the run, and kill it when part of a write is in its file, which stays."""
    store, count = PartFiles.store_next, 0

    def half(self, number, arrays):
        nonlocal count
        count += 1
        if count < write:
            store(self, number, arrays)
            return
        store(self, number, [*map(np.asarray, arrays[:1]), *map(np.zeros_like, arrays[1:])])
        raise Death

    def left(self):
        self._lock_file.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartFiles, "store_next", half)
        patch.setattr(PartFiles, "close", left)
        with pytest.raises(Death):
            pretrain.main(command(run, "files"))


@pytest.mark.slow
def test_a_run_killed_within_an_update_continues_bitwise(tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert pretrain.main(command(whole, "files")) == ExitCode.DONE
    die_within(run, 10)  # of 4 parts a step: the second of step 3
    assert pretrain.main(command(run, "files")) == ExitCode.DONE
    wanted, found = saved_leaves(whole, STEPS), saved_leaves(run, STEPS)
    assert wanted.keys() == found.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    assert logged_losses(run) == logged_losses(whole)
    assert not list((run / "optimizer").glob("*/*"))


@pytest.mark.large
def test_a_run_changes_the_memory_of_its_state_at_a_resume(tmp_path):
    """The arrays of a checkpoint are the same; so is the training, but for rounding."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert pretrain.main(command(whole, "device")) == ExitCode.DONE
    die_within(run, 11)
    assert pretrain.main(command(run, "device")) == ExitCode.DONE
    wanted, found = logged_losses(whole), logged_losses(run)
    assert wanted.keys() == found.keys()
    np.testing.assert_allclose([*found.values()], [*wanted.values()], rtol=1e-5)
