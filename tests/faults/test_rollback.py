# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Repeated bad steps: the run ends, or rolls back once and skips their data."""

import contextlib
import json

import numpy as np
import pytest

from experiments import pretrain, replay
from experiments.cli.flags import ExitCode
from jaxmoe.checkpoint import CheckpointAbandonedError, CheckpointManager
from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.data import DataError, Loader, MarkovConfig, SkippedRows
from jaxmoe.resilience import stop
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.restore import Continuation, read_skipped
from jaxmoe.run.trainer import Trainer
from tests.support.faults import poisoned, read_batches
from tests.support.ports import free_port
from tests.support.runs import flags, logged_losses, saved_leaves, start_run, written_by

STEPS, WINDOW = 20, [8, 24]  # before the step of index 8, the rows of 3 steps


def is_bad(row: int) -> bool:
    return 8 * 8 <= row < 8 * 11


def command(run, *more):
    brief = ("--checkpoint.every", "5", "--evaluation.every", "0", "--tracking.sample_length", "0")
    return flags(run, STEPS, "--training.guard.max_skipped", "3", *brief, *more)


def summary(run):
    return json.loads((run / "summary.json").read_text())


def check_same(run, other):
    wanted, found = saved_leaves(other, STEPS), saved_leaves(run, STEPS)
    assert wanted.keys() == found.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
        assert not np.issubdtype(leaf.dtype, np.floating) or np.isfinite(leaf).all(), path
    assert logged_losses(run) == logged_losses(other)
    assert len(logged_losses(run)) == STEPS


@contextlib.contextmanager
def stopped_after(*calls):
    """Request a stop after some steps of this process, over all starts."""
    asked = []

    def agreed(self):
        asked.append(True)
        return "preempted" if len(asked) in calls else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop.StopRequest, "agree", agreed)
        yield


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    with poisoned(is_bad), read_batches() as read:
        assert pretrain.main(command(run)) == ExitCode.DONE
    return run, read


@pytest.mark.slow
def test_rollback_skips_the_bad_window_bitwise(rolled_back, tmp_path):
    """Bitwise as a run whose loader lacks the window."""
    run, read = rolled_back
    numbers = summary(run)
    assert (numbers["status"], numbers["rollbacks"], numbers["skipped_steps"]) == ("done", 1, 3)
    assert json.loads((run / "skipped.json").read_text()) == [WINDOW]
    assert [p.name for p in (run / "checkpoints" / "damaged").iterdir()] == ["10"]

    without = tmp_path / "without"
    without.mkdir()
    (without / "skipped.json").write_text(json.dumps([WINDOW]))
    with read_batches() as others:
        assert pretrain.main(command(without)) == ExitCode.DONE
    check_same(run, without)
    assert read == others and summary(without)["skipped_steps"] == 0


@pytest.mark.slow
def test_restart_after_rollback_reads_the_same_data(rolled_back, tmp_path):
    """Stopped before the window, which only the file tells of then; and after it."""
    run, read = rolled_back
    again = tmp_path / "again"
    # 15 steps, then 6 and 7; 8 to 12; the rest.
    with poisoned(is_bad), read_batches() as others, stopped_after(17, 22):
        codes = [pretrain.main(command(again)) for _ in range(3)]
    assert codes == [ExitCode.PREEMPTED, ExitCode.PREEMPTED, ExitCode.DONE]
    check_same(again, run)
    assert read == others


@pytest.mark.slow
def test_the_batches_are_replayed(rolled_back, capsys):
    run, _ = rolled_back
    dumps = run / "bad_data"
    assert sorted(p.name for p in dumps.glob("*.npz")) == ["step10.npz", "step11.npz", "step9.npz"]
    assert replay.main(["--run.directory", str(run), "--step", "9"]) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert "step 9, with the parameters of step" in printed and "are not finite" in printed
    found = summary(dumps / "replay9")
    first, *rest = found["rows"]
    assert (first["row"], first["place"]) == (64, 0) and first["not_finite"] > 0
    assert {row["row"] for row in rest} == set(range(65, 72))
    assert all(row["not_finite"] == 0 and row["loss"] > 0 for row in rest)
    assert found["arrays"] and all(array["not_finite"] for array in found["arrays"])
    with pytest.raises(SystemExit) as stopped:
        replay.main(["--run.directory", str(run), "--step", "5"])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    assert "has no batch of that step (has: 9, 10, 11)" in capsys.readouterr().err


@pytest.mark.slow
def test_persistent_fault_ends_the_run(tmp_path, capsys):
    """At once without rollbacks; otherwise after one; nothing bad is saved."""
    run = tmp_path / "run"
    with poisoned(lambda row: row >= 64):
        assert pretrain.main(command(run, "--training.guard.rollbacks", "0")) == ExitCode.DIVERGED
        assert summary(run)["rollbacks"] == 0 and summary(run)["steps"] == 13
        assert not (run / "skipped.json").exists() and (run / "bad_data" / "step9.npz").exists()
        capsys.readouterr()
        # The newest checkpoint is that of step 10, two steps into the bad ones.
        assert pretrain.main(command(run)) == ExitCode.DIVERGED
    assert "rolled back to the checkpoint of step 5: steps 9 to 11" in capsys.readouterr().out
    assert json.loads((run / "skipped.json").read_text()) == [WINDOW]
    assert summary(run)["rollbacks"] == 1 and summary(run)["status"] == "diverged"
    good = saved_leaves(run, 5)
    for leaf in [*good.values(), *saved_leaves(run, 10).values()]:
        assert not np.issubdtype(leaf.dtype, np.floating) or np.isfinite(leaf).all()


TWO = """
import sys
from experiments import pretrain
from tests.support.faults import poisoned

with poisoned(lambda row: 64 <= row < 88):
    sys.exit(pretrain.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_processes_roll_back_together(tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    running = []
    for index in range(2):
        monkeypatch.setenv("JAX_PROCESS_ID", str(index))
        running.append(start_run(command(run), TWO))
    printed = written_by(*running)
    assert [process.returncode for process in running] == [ExitCode.DONE] * 2, "\n".join(printed)
    assert printed[0].count("rolled back to the checkpoint of step 5: steps 9 to 11") == 1
    assert summary(run)["rollbacks"] == 1 and read_skipped(RunDirectory(run)).windows == ((8, 24),)
    assert np.isfinite(list(logged_losses(run).values())).all()
    with np.load(run / "bad_data" / "step9.npz") as dumped:
        assert dumped["rows"].tolist() == list(range(64, 72)), "of both hosts"


def loader(seed: int = 0, batch_size: int = 8) -> Loader:
    source = MarkovConfig().build(seed)
    return Loader(source, batch_size=batch_size, sequence_length=4, seed=seed)


def manifest(data: dict, step: int) -> CheckpointManifest:
    return CheckpointManifest(step=step, arrays={}, config={}, data=json.loads(json.dumps(data)))


def test_which_checkpoints_continue_a_run():
    jumped = SkippedRows(((8, 24),))
    early, late = loader().position(5), loader().position(10)
    continuation = Continuation(loader(), jumped)
    continuation.check(manifest(early, 5))
    assert continuation.loader.skipped == jumped, "the file tells of what comes"
    continuation.check(manifest(loader().position(8), 8))
    with pytest.raises(CheckpointAbandonedError, match="step 10 has read rows that the run has"):
        continuation.check(manifest(late, 10))
    after = loader().without_steps(8, 10).position(10)
    assert after["skipped"] == [[8, 24]]
    continuation.check(manifest(after, 10))
    lost = Continuation(loader(), SkippedRows())
    lost.check(manifest(after, 10))
    assert lost.loader.skipped == jumped, "the file was lost, and the checkpoint knows"
    with pytest.raises(DataError, match="must be a list of"):
        lost.check(manifest(after | {"skipped": "all"}, 10))


def test_other_data_than_the_checkpoint_has_read_are_refused():
    """Another batch, seed or data set; the number of hosts is nothing to the rows."""
    saved = manifest(loader().position(5), 5)
    for other, line in (
        (loader(batch_size=4), "batch_size: 8 in the checkpoint, 4 now"),
        (loader(seed=1), "seed: 0 in the checkpoint, 1 now"),
        (Loader(MarkovConfig(vocab_size=9).build(0), batch_size=8, sequence_length=4, seed=0),
         "in the checkpoint, 9 now"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=line):
            Continuation(other, SkippedRows()).check(saved)
    jumping = loader().without_steps(2, 3)
    whole = jumping.batch(7).tokens
    for count in (2, 4):
        parts = [jumping.batch(7, process_index=i, process_count=count) for i in range(count)]
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), whole)
    np.testing.assert_array_equal(whole, loader().batch(9).tokens)


def test_a_damaged_record_of_jumped_rows_is_refused(tmp_path):
    directory = RunDirectory(tmp_path)
    assert read_skipped(directory) == SkippedRows()
    directory.write_skipped([[8, 24], [9, 8]])
    assert read_skipped(directory).windows == ((8, 24), (9, 8))
    (tmp_path / "skipped.json").write_text("[[8")
    with pytest.raises(ValueError, match="skipped.json is not JSON"):
        read_skipped(directory)


def test_abandoned_steps_alone_begin_anew(tmp_path, caplog):
    """Refused from the first step on: there is nothing before to go back to."""
    manager = CheckpointManager(tmp_path)
    state = {"x": np.zeros((2,), np.float32)}
    assert manager.save(3, state, config={}, data=loader().position(3)) and manager.finish()
    continuation = Continuation(loader(), SkippedRows(((0, 24),)))
    assert manager.restore_newest(state, check=continuation.check) is None
    manager.close()
    assert (tmp_path / "damaged" / "3").is_dir() and "set aside" in caplog.text


def test_a_step_moves_when_all_processes_have_read_it(tmp_path, monkeypatch):
    """The others may come later to the manifest for which the first one gives a step up."""
    manager = CheckpointManager(tmp_path)
    state = {"x": np.zeros((2,), np.float32)}
    assert manager.save(3, state, config={}, data=loader().position(3)) and manager.finish()
    met = []

    def check(saved):
        met.clear()
        raise CheckpointAbandonedError("left behind")

    def agree(value):
        met.append((tmp_path / "3").exists())
        return value

    for room in ("manager", "commit"):
        monkeypatch.setattr(f"jaxmoe.checkpoint.{room}.agree", agree)
    assert manager.restore_newest(state, check=check) is None
    assert met == [True, False]
    manager.close()


@pytest.mark.slow
@pytest.mark.trains
def test_a_run_that_was_taken_over_does_not_go_back(tmp_path, monkeypatch, capsys):
    thief, go_back = RunDirectory(tmp_path / "run"), Trainer._go_back

    def robbed(self):
        thief.acquire(steal=True)
        return go_back(self)

    monkeypatch.setattr(Trainer, "_go_back", robbed)
    try:
        with poisoned(is_bad):
            more = ("--run.lock.heartbeat", "60")
            assert pretrain.main(command(tmp_path / "run", *more)) == ExitCode.TAKEN_OVER
        assert "this process (incarnation 1) writes nothing more" in capsys.readouterr().err
    finally:
        thief.release()
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not left & {"bad_data", "skipped.json", "summary.json"}
