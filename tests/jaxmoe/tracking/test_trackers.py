# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trackers that are extras, against made-up packages; and what a missing package says."""

from __future__ import annotations

import pathlib
import sys
import types

import numpy as np
import pytest

from jaxmoe.tracking import LOSS, TRACKERS, MissingPackageError, TrackedRun, Tracker
from jaxmoe.tracking.history import load_metrics


class FakeRun:
    def __init__(self):
        self.calls = []

    def log(self, data, **more):
        self.calls.append(("log", data, more))

    def define_metric(self, *names, **more):
        self.calls.append(("define", names, more))

    def finish(self):
        self.calls.append(("finish",))


class FakeImage:
    """wandb.Image (0.31) and trackio.Image (0.43): what both take."""

    def __init__(self, value, caption=None):
        assert isinstance(value, np.ndarray) and value.dtype == np.uint8
        self.value, self.caption = value, caption


class FakeHistogram:
    """wandb.Histogram and trackio.Histogram: a pair of counts and edges."""

    def __init__(self, sequence=None, np_histogram=None, num_bins=64):
        counts, edges = np_histogram
        assert sequence is None and len(counts) == len(edges) - 1 <= 512
        self.counts = counts


@pytest.fixture
def packages(monkeypatch):
    """Fake wandb and trackio, which note how they are called."""
    made = {}
    for name in ("wandb", "trackio"):
        module = types.ModuleType(name)
        module.run, module.inits = FakeRun(), []

        def init(module=module, **arguments):
            module.inits.append(arguments)
            return module.run

        module.init = init
        module.Error = type("Error", (Exception,), {})
        module.Settings = lambda **settings: settings
        module.Html = lambda text: ("html", text)
        module.Markdown = lambda text: ("markdown", text)
        module.Image, module.Histogram = FakeImage, FakeHistogram
        monkeypatch.setitem(sys.modules, name, module)
        made[name] = module
    return made


def run_in(directory: pathlib.Path, resume_step: int = 0) -> TrackedRun:
    return TrackedRun(
        name="tiny", directory=directory, config={"model": {"top_k": 2}}, resume_step=resume_step
    )


def test_wandb_gets_every_step_and_finds_its_run_again(packages, tmp_path):
    wandb = packages["wandb"]
    config = TRACKERS["wandb"](project="mine", mode="offline")
    config.check()
    for resume_step in (0, 20):
        tracker = config.build(run_in(tmp_path / "run", resume_step))
        assert isinstance(tracker, Tracker)
    tracker.log(3, {LOSS: 2.5})
    tracker.log_text(3, "sample", "a <b>")
    tracker.close()
    first, second = wandb.inits
    assert first == second and first["resume"] == "allow" and len(first["id"]) == 16
    assert (first["project"], first["mode"], first["name"]) == ("mine", "offline", "tiny")
    assert first["config"] == {"model": {"top_k": 2}}
    assert first["settings"] == {"console": "off", "silent": True}
    config.build(run_in(tmp_path / "other"))
    assert wandb.inits[2]["id"] != first["id"]
    # A step of its own in every record: W&B's may not go back when a run is resumed.
    assert ("define", ("*",), {"step_metric": "step"}) in wandb.run.calls
    assert ("log", {"step": 3, LOSS: 2.5}, {}) in wandb.run.calls
    page = {"step": 3, "sample": ("html", "<pre>a &lt;b&gt;</pre>")}
    assert ("log", page, {}) in wandb.run.calls and ("finish",) in wandb.run.calls


def test_wandb_that_refuses_is_an_error_in_words(packages, tmp_path):
    def refuse(**_):
        raise packages["wandb"].Error("no API key configured")

    packages["wandb"].init = refuse
    with pytest.raises(ValueError, match="no API key configured\nlog in with `wandb login`"):
        TRACKERS["wandb"]().build(run_in(tmp_path))


def test_trackio_gets_every_step(packages, tmp_path):
    trackio = packages["trackio"]
    config = TRACKERS["trackio"]()
    config.check()
    tracker = config.build(run_in(tmp_path / "a"))
    tracker.log(3, {LOSS: 2.5})
    tracker.log_text(3, "sample", "abc")
    tracker.close()
    config.build(run_in(tmp_path / "b"))
    first, second = trackio.inits
    assert first["name"].startswith("tiny-") and first["name"] != second["name"]
    assert first["resume"] == "allow" and first["project"] == "jaxmoe"
    assert trackio.run.calls == [
        ("log", {LOSS: 2.5}, {"step": 3}),
        ("log", {"sample": ("markdown", "```\nabc\n```")}, {"step": 3}),
        ("finish",),
    ]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_loads_are_histograms_and_the_load_map_an_image(packages, tmp_path, name):
    tracker = TRACKERS[name]().build(run_in(tmp_path / "run"))
    scalars, histograms = load_metrics(np.full((3, 128), 1 / 128))
    tracker.log(20, scalars)
    tracker.log_histograms(20, histograms)
    tracker.log_image(20, "router/load_map", np.zeros((4, 5, 3), np.uint8), "how to read it")
    logged = [call[1:] for call in packages[name].run.calls if call[0] == "log"]
    assert all((data.get("step") or more.get("step")) == 20 for data, more in logged)
    (numbers, _), (distributions, _), (picture, _) = logged
    assert numbers["router/layer_02/max_violation"] == 0.0
    assert distributions["router/layer_02/load"].counts.sum() == 128
    image = picture["router/load_map"]
    assert image.value.shape == (4, 5, 3) and image.caption == "how to read it"


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("wandb", "wandb", "wandb"),
        ("trackio", "trackio", "trackio"),
        ("tensorboard", "tensorboardX", "train"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name, module, extra):
    for loaded in [key for key in sys.modules if key.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError) as error:
        TRACKERS[name]().check()
    assert str(error.value) == f"{module} is not installed: pip install 'jaxmoe[{extra}]'"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_an_empty_project_is_refused(name):
    with pytest.raises(ValueError, match="project='' must be a name"):
        TRACKERS[name](project="")
