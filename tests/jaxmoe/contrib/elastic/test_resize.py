# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run that goes on on other devices equals the run that stayed, and nothing is stored for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from experiments import recipes, resize
from experiments.cli.exit_codes import ExitCode
from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.contrib.elastic import resizing
from jaxmoe.contrib.elastic.request import (
    AxisSizes,
    DevicePlace,
    ResizeRequest,
    check_resized,
    read_resizes,
    resolve,
)
from jaxmoe.data import MarkovConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import LinearConfig
from jaxmoe.routing import NoisyTopKConfig, SoftmaxGateConfig
from jaxmoe.run import Run, parts
from jaxmoe.run.assemble import assemble
from jaxmoe.run.config import CheckpointConfig, EvaluationConfig, TrackingConfig
from sharding import MeshConfig
from tests.support.faults import read_batches
from tests.support.runs import logged_losses, saved_leaves

STEPS = 14


def config():
    """A run with noise in its router, whose batch and width 2, 3, 4, 6 and 8 devices divide."""
    return dataclasses.replace(
        recipes.markov(steps=STEPS, batch_size=24, sequence_length=16),
        model=ModelConfig(
            vocab_size=24,
            num_layers=1,
            embed_dim=24,
            attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=24),
            moe=MoEConfig(
                num_experts=4,
                top_k=2,
                expert_dim=24,
                router=NoisyTopKConfig(),
                gate=SoftmaxGateConfig(),
            ),
        ),
        data=MarkovConfig(),
        schedule=LinearConfig(warmup_steps=2),
        evaluation=EvaluationConfig(every=0, batches=2),
        checkpoint=CheckpointConfig(every=0),
        tracking=TrackingConfig(trackers=(), sample_length=0, print_every=1),
    )


@contextlib.contextmanager
def prepared_at_once():
    """Return a wait for the mesh that a run prepares in its thread."""
    prepare, finished = resizing.prepare_mesh, threading.Event()

    def watched(*given):
        try:
            return prepare(*given)
        finally:
            finished.set()

    def wait():
        assert finished.wait(120)
        finished.clear()
        time.sleep(0.05)  # the result is passed on

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resizing, "prepare_mesh", watched)
        patch.setattr(resizing, "_POLL_SECONDS", 0.0)
        patch.setattr(parts, "_POLL_SECONDS", 0.0)
        yield wait


def train(run, requests):
    """Train a run; write a request after a step, which the run reads after the next one."""
    gaps, before = {}, None
    with prepared_at_once() as wait:
        for step in run.steps():
            jax.block_until_ready(step.metrics.loss)
            now = time.perf_counter()
            if before is not None:
                gaps[step.step] = now - before
            if step.step in requests:
                requests[step.step](run.directory)
            if step.step - 1 in requests:
                wait()
            before = time.perf_counter()
    return gaps


@pytest.fixture(scope="module")
def stays(tmp_path_factory):
    """A run on 8 devices, and the batches that it has read."""
    run = Run(config(), tmp_path_factory.mktemp("runs") / "stays")
    with read_batches() as batches:
        assert run.train().status == "done"
    return run, batches


@pytest.fixture(scope="module")
def moves(tmp_path_factory):
    """The run that goes on on 6 devices, is refused 5, and returns to 8; with what it did."""
    run, saved = Run(config(), tmp_path_factory.mktemp("runs") / "moves"), []
    save, restore = CheckpointManager.save, CheckpointManager.restore_newest

    def noted(self, step, *given, **named):
        saved.append(step)
        return save(self, step, *given, **named)

    def noted_restore(self, *given, **named):
        saved.append("restored")
        return restore(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch, read_batches() as batches:
        patch.setattr(CheckpointManager, "save", noted)
        patch.setattr(CheckpointManager, "restore_newest", noted_restore)
        command = Command()
        gaps = train(run, {2: command, 5: asked("odd", 5), 8: asked("more", 8)})
    assert command.code() == ExitCode.DONE
    return run, batches, gaps, saved


def asked(name, data):
    """Return a function that writes a request by hand."""
    text = json.dumps({"mesh": {"data": data}, "name": name})
    return lambda directory: directory.resize_file.write_text(text)


class Command:
    """The command in a thread, which ends when the run has answered."""

    def __call__(self, directory):
        words = ["--run.directory", str(directory.path), "--mesh.data", "6"]
        self._future = self._pool.submit(resize.main, words)
        while not directory.resize_file.exists() and not self._future.done():
            time.sleep(0.01)

    def __init__(self):
        self._pool = ThreadPoolExecutor(1)

    def code(self):
        return self._future.result(timeout=60)


@pytest.mark.slow
def test_eight_six_eight_devices_equal_eight(stays, moves):
    (stayed, wanted), (moved, found, *_) = stays, moves
    assert moved.result.status == "done"
    assert found == wanted and len(found) == STEPS, "the rows of every step"
    losses, others = (logged_losses(run.directory.path) for run in (moved, stayed))
    assert list(losses) == list(others) == [*range(1, STEPS + 1)]
    np.testing.assert_allclose([*losses.values()], [*others.values()], rtol=1e-5)
    state, other = (saved_leaves(run.directory.path, STEPS) for run in (moved, stayed))
    assert state.keys() == other.keys()
    for path, leaf in other.items():
        if "rng" in path or "step" in path:
            np.testing.assert_array_equal(state[path], leaf, err_msg=path)
        np.testing.assert_allclose(state[path], leaf, rtol=1e-3, atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_the_state_moves_without_storage(moves):
    run, _, gaps, saved = moves
    assert saved == ["restored", STEPS], "the start and the end of the run, and no resize"
    fewer, more = run.summary()["resizes"]
    size = sum(leaf.nbytes for leaf in saved_leaves(run.directory.path, STEPS).values())
    for event in (fewer, more):
        assert event["moved_bytes"] == pytest.approx(size, rel=0.01)
        assert 0 < event["pause_seconds"] < gaps[event["step"] + 1]


@pytest.mark.slow
def test_files_say_on_which_mesh_a_run_was(moves):
    run = moves[0]
    summary = run.summary()
    assert summary["mesh"] == {"data": 8} and summary["goodput"]["seconds"]["resize"] > 0
    fewer, more = summary["resizes"]
    assert (fewer["mesh"], fewer["devices"]) == ({"data": 6}, [*range(6)])
    assert (more["mesh"], more["devices"]) == ({"data": 8}, [*range(8)])
    assert 3 <= fewer["step"] < more["step"] < STEPS
    steps, devices = run.metrics()["mesh/devices"]
    assert dict(zip(steps.tolist(), devices.tolist(), strict=True)) == {
        fewer["step"]: 6,
        more["step"]: 8,
    }
    environment = run.directory.environment()
    assert environment["mesh"]["data"] == len(environment["devices"]) == 8
    assert environment["spare_devices"] == []
    words = (
        rf"resized at step {fewer['step']}: 6 of 8 devices, mesh data=6; compiled in \d+\.\d s"
        r" beside the training, 0\.1 MB moved, pause \d+\.\d\d s"
    )
    assert re.fullmatch(words, fewer["message"])


@pytest.mark.slow
def test_a_refused_resize_is_explained_and_the_run_goes_on(moves):
    fewer, odd, more = read_resizes(moves[0].directory)
    assert [event["status"] for event in (fewer, odd, more)] == ["done", "refused", "done"]
    assert odd["message"] == (
        "mesh.data=5 divides the rows of a batch among 5 devices, and training.batch_size=24 stays,"
        " which is no multiple of 5; sizes of mesh.data that fit 8 devices: 1, 2, 3, 4, 6, 8"
    )
    assert not moves[0].directory.resize_file.exists()


WAY_OUT = 'write an object such as {"mesh": {"data": 6}}, or remove the file'
REFUSALS = {
    "{": "resize.json is not JSON (Expecting property name enclosed in double quotes: line 1 column"
    f" 2 (char 1)): {WAY_OUT}",
    "[]": f"resize.json holds a list, and must hold an object: {WAY_OUT}",
    "{}": "a resize changes nothing: give the size of an axis, such as mesh.data=6, or devices to"
    " leave out, such as without=7",
    '{"mesh": {"date": 6}}': "mesh.date is not a field of AxisSizes: did you mean 'data'?",
    '{"mesh": {"data": 0}}': "mesh: mesh.data=0 must be at least 1",
    '{"mesh": {"data": 8}}': "the run is on this mesh already: devices 0,1,2,3,4,5,6,7",
    '{"mesh": {"data": 12}}': "the mesh (data=12) needs 12 devices, and 8 are there; sizes of"
    " mesh.data that fit 8 devices: 1, 2, 3, 4, 6, 8",
    '{"without": [9]}': "without=9 names no device of this run: it has 0,1,2,3,4,5,6,7",
    '{"mesh": {"data": 8}, "without": [7]}': "the mesh (data=8) needs 8 devices, and 7 are there;"
    " sizes of mesh.data that fit 7 devices: 1, 2, 3, 4, 6",
}


def test_every_refusal_says_what_fits():
    assembly = assemble(config(), trains=True)
    for text, message in REFUSALS.items():
        with pytest.raises(ValueError) as error:
            resizing.prepare_mesh(text, assembly, 0, assembly.state_shapes())
        assert str(error.value) == message


def test_devices_to_leave_out_shrink_data_to_the_largest_size_that_fits():
    running, places = MeshConfig(data=8), [DevicePlace(id=number) for number in range(8)]
    check = functools.partial(check_resized, config())
    found = resolve(ResizeRequest(without=(1, 5)), running, places, check)
    assert found == (MeshConfig(data=6), (0, 2, 3, 4, 6, 7))
    found = resolve(ResizeRequest(without=(1,)), running, places, check)
    assert found == (MeshConfig(data=6), (0, 2, 3, 4, 5, 6))
    wide = AxisSizes(data=2, expert=4)
    found = resolve(ResizeRequest(mesh=wide), running, places, lambda mesh: None)
    assert found == (MeshConfig(data=2, expert=4), (0, 1, 2, 3, 4, 5, 6, 7))


def test_every_process_keeps_as_many_devices():
    places = [DevicePlace(id=number, process=number // 4) for number in range(8)]
    running = MeshConfig(data=8)
    found = resolve(ResizeRequest(mesh=AxisSizes(data=6)), running, places, lambda mesh: None)
    assert found == (MeshConfig(data=6), (0, 1, 2, 4, 5, 6))
    with pytest.raises(ValueError) as error:
        given = ResizeRequest(mesh=AxisSizes(data=6), without=(0, 1))
        resolve(given, running, places, lambda mesh: None)
    assert str(error.value) == (
        "the 2 processes hold equal parts of a mesh, and 6 devices are not as many of each (the"
        " first has 2, the fewest are 2); sizes of mesh.data that fit 6 devices: 2, 4"
    )
