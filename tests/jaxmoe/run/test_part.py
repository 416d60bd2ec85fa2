# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a run asks of its parts, and in which order."""

import dataclasses
import inspect
import pkgutil
import subprocess
import sys

import pytest

from jaxmoe import catalog
from jaxmoe.catalog import choice
from jaxmoe.contrib.elastic.resizing import Resizing
from jaxmoe.contrib.elastic.shrink import Shrink
from jaxmoe.contrib.ensembles.kept_partition import KeptPartition
from jaxmoe.contrib.offload.optimizer_files import OptimizerFiles
from jaxmoe.contrib.slow_links.run_part import ReplicasPart
from jaxmoe.contrib.slow_links.site_part import Site
from jaxmoe.contrib.slow_links.sites.config import VARIABLE
from jaxmoe.contrib.survival.devices import (
    LinkMeasurements,
    LinkMeasurementsConfig,
    Recomputation,
    RecomputationConfig,
)
from jaxmoe.contrib.survival.recovery import CheckFreeConfig, Replacement
from jaxmoe.contrib.survival.snapshots import Snapshots, SnapshotsConfig
from jaxmoe.contrib.telemetry.gradients import GradientComparison
from jaxmoe.contrib.telemetry.part import Telemetry
from jaxmoe.resilience.shared_memory import ELASTIC
from jaxmoe.run import Run, prepare
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import (
    FILES,
    HISTORY,
    PARTS,
    REQUESTS,
    ConfiguredPart,
    PartRequest,
    RunPart,
    TimeLimit,
    TimeLimitConfig,
    make_parts,
)
from jaxmoe.run.provenance.lineage import Event, add_event
from jaxmoe.run.reporting.summary import with_rows
from jaxmoe.run.supervision import library_supervision
from tests.jaxmoe.run.test_run import config
from tests.support.source_tree import ROOT

MEMBERS = (
    GradientComparison,
    KeptPartition,
    LinkMeasurements,
    OptimizerFiles,
    Recomputation,
    Replacement,
    ReplicasPart,
    PartRequest,
    Resizing,
    Shrink,
    Site,
    Snapshots,
    Telemetry,
    TimeLimit,
)
ABSENT = {"jaxmoe.contrib", "jaxmoe.run.serving"}
SOCKET = [name for name, _ in inspect.getmembers(RunPart, inspect.isfunction)]
ORDER = (
    "fit",
    "prepare",
    "sources",
    "restore",
    "record",
    "heading",
    "join",
    "around",
    "hooks",
    "begin",
    "event",
    "event",
    "event",
    "end",
    "rows",
    "close",
)
RECORDS = ("step_numbers", "flush")
"""What follows reports and saves, whose steps the config chooses; of a part that is a recorder."""


def test_the_table_has_every_part(tmp_path):
    direct = {*RunPart.__subclasses__()} - {Recorder, ConfiguredPart}
    assert direct | {*ConfiguredPart.__subclasses__()} == set(MEMBERS)
    addresses = {address for _, address in PARTS} | {
        *(part for part, _ in FILES.values()),
        *REQUESTS.values(),
    }
    asked_for = {pkgutil.resolve_name(address) for address in addresses}
    chosen = catalog.names("run_part")
    directory = RunDirectory(tmp_path)
    with library_supervision(PretrainConfig().timeouts) as supervision:
        built = {type(choice("run_part", name)().build(directory, supervision)) for name in chosen}
    assert asked_for | built == {*MEMBERS} - {PartRequest}
    assert {*HISTORY.values()} <= {*chosen}


NAMES = {
    "default": (PretrainConfig(), {}, ("PartRequest",)),
    "all": (
        PretrainConfig(
            parts=(
                TimeLimitConfig(),
                LinkMeasurementsConfig(every=4),
                RecomputationConfig(every=3),
                CheckFreeConfig(),
                SnapshotsConfig(every=2),
            ),
        ),
        {"JAXMOE_ELASTIC": "shrink"},
        (
            "Shrink",
            "PartRequest",
            "Snapshots",
            "Replacement",
            "Recomputation",
            "LinkMeasurements",
            "TimeLimit",
        ),
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_has_the_parts_that_it_asks_for(name, tmp_path, monkeypatch):
    config, environment, names = NAMES[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with library_supervision(config.timeouts) as supervision:
        parts = make_parts(config, RunDirectory(tmp_path), supervision)
    assert tuple(type(part).__name__ for part in parts) == names


def test_a_part_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match="parts=time_limit, time_limit: name each at most once"):
        PretrainConfig(parts=(TimeLimitConfig(), TimeLimitConfig(minutes=3.0)))


def test_a_row_of_a_part_replaces_no_entry_of_the_run(caplog):
    rows = {"status": "odd", "replicas": "two", "norms": [1.0]}
    found = with_rows({"status": "done", "replicas": None}, rows)
    assert found == {"status": "done", "replicas": "two", "norms": [1.0]}
    assert "rows status, which summary.json has of the run itself" in caplog.text


def test_the_history_of_a_run_asks_for_a_part(tmp_path):
    config, directory = PretrainConfig(), RunDirectory(tmp_path)
    with directory.held():
        add_event(directory, Event(event="averaged", step=3, changes=("layer 1",)))
    with library_supervision(config.timeouts) as supervision:
        parts = make_parts(config, directory, supervision)
    assert [type(part) for part in parts] == [PartRequest, Replacement]


def test_variables_of_the_table_are_those_of_their_owners():
    assert (ELASTIC, VARIABLE) == ("JAXMOE_ELASTIC", "JAXMOE_ISLAND")


def test_a_default_run_imports_no_part():
    """Nor what only parts need."""
    program = f"""
import sys
from experiments import pretrain
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import make_parts
from jaxmoe.run.supervision import library_supervision
config = PretrainConfig()
with library_supervision(config.timeouts) as supervision:
    make_parts(config, RunDirectory("nowhere"), supervision)
absent = {sorted(ABSENT)}
print([name for name in sys.modules if name.startswith(tuple(absent))])
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("part", MEMBERS, ids=lambda part: part.__name__)
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
    """A part and a recorder of steps that only notes what it is asked."""

    def __init__(self):
        self.calls = []

    for _name in SOCKET:
        locals()[_name] = _recording(_name)

    def begin(self, assembly, step, state, watches):
        self.calls.append("begin")
        watches.reporter.add_recorder(self)

    def step_numbers(self, step, metrics):
        self.calls.append("step_numbers")
        return {}

    def flush(self):
        self.calls.append("flush")


@pytest.mark.slow
def test_a_run_asks_a_part_in_the_order_of_its_contract(tmp_path, monkeypatch):
    """And does the same with a part that only has the neutral defaults."""
    recorder = Recorder()

    def with_recorder(config, directory, supervision):
        return [*make_parts(config, directory, supervision), recorder]

    short = config()
    short = dataclasses.replace(short, training=dataclasses.replace(short.training, steps=3))
    losses = [step.loss for step in Run(short, tmp_path / "plain").steps()]
    monkeypatch.setattr(prepare, "make_parts", with_recorder)
    assert [step.loss for step in Run(short, tmp_path / "recorded").steps()] == losses
    calls = recorder.calls
    assert tuple(name for name in calls if name not in RECORDS) == ORDER
    assert calls.count("step_numbers") == 3
    assert calls.index("begin") < calls.index("step_numbers")
    assert "flush" in calls[len(calls) - calls[::-1].index("step_numbers") : calls.index("close")]
    assert set(SOCKET) - set(ORDER) == {"move"}
