# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a run asks of its parts, and in which order."""

import dataclasses
import inspect

import pytest

from jaxmoe.run import Run, prepare
from jaxmoe.run.elastic.resizing import Resizing
from jaxmoe.run.parts.base import RunPart
from jaxmoe.run.parts.members import LinkMeasurements, OptimizerFiles, Recomputation, Replacement
from jaxmoe.run.parts.snapshots import Snapshots
from jaxmoe.run.parts.time_limit import TimeLimit
from jaxmoe.run.replicas.islands import Island
from tests.jaxmoe.run.test_run import config

PARTS = (
    *(Island, LinkMeasurements, OptimizerFiles, Recomputation, Replacement, Resizing, Snapshots),
    TimeLimit,
)
SOCKET = [name for name, _ in inspect.getmembers(RunPart, inspect.isfunction)]
ORDER = (
    *("restored", "join", "around", "hooks", "begin"),
    *("event", "event", "event"),
    *("ended", "rows", "close"),
)


def test_the_table_has_every_part():
    assert set(RunPart.__subclasses__()) - {Recorder} == set(PARTS)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_part_keeps_the_signatures_of_the_socket(part):
    overridden = [name for name in SOCKET if name in vars(part)]
    assert overridden, "it would do nothing in a run"
    for name in overridden:
        wanted = inspect.signature(getattr(RunPart, name)).parameters
        assert list(inspect.signature(getattr(part, name)).parameters) == list(wanted), name


def _recording(name):
    plain = getattr(RunPart, name)

    def method(self, *arguments):
        self.calls.append(name)
        return plain(self, *arguments)

    return method


class Recorder(RunPart):
    """A part that does nothing but note what it is asked."""

    def __init__(self):
        self.calls = []

    for _name in SOCKET:
        locals()[_name] = _recording(_name)


@pytest.mark.slow
def test_a_run_asks_a_part_in_the_order_of_its_contract(tmp_path, monkeypatch):
    """And does the same with a part that only has the neutral defaults."""
    recorder, make_parts = Recorder(), prepare.make_parts

    def with_recorder(begun, directory, supervision, snapshots):
        supervision.resources.callback(recorder.close)
        return (*make_parts(begun, directory, supervision, snapshots), recorder)

    short = config()
    short = dataclasses.replace(short, training=dataclasses.replace(short.training, steps=3))
    losses = [step.loss for step in Run(short, tmp_path / "plain").steps()]
    monkeypatch.setattr(prepare, "make_parts", with_recorder)
    assert [step.loss for step in Run(short, tmp_path / "recorded").steps()] == losses
    assert tuple(recorder.calls) == ORDER
    assert set(SOCKET) - set(ORDER) == {"move", "go_back"}
