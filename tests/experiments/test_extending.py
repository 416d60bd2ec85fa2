# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The example of `.docs/concepts/extending.md`, installed beside the library."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

from tests.support.source_tree import ROOT

PAGE = (ROOT / ".docs" / "concepts" / "extending.md").read_text(encoding="utf-8")
SMALL = (
    "--model.num_layers",
    "1",
    "--model.embed_dim",
    "16",
    "--model.moe.expert_dim",
    "16",
    "--model.attention.num_heads",
    "1",
    "--model.attention.num_kv_heads",
    "1",
    "--model.attention.head_dim",
    "16",
    "--model.moe.num_experts",
    "4",
    "--training.steps",
    "2",
    "--training.batch_size",
    "8",
    "--training.sequence_length",
    "16",
    "--schedule.warmup_steps",
    "0",
    "--evaluation.batches",
    "1",
    "--tracking.sample_length",
    "0",
    "--tracking.trackers",
)


def _block(language):
    return re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def site(tmp_path):
    """Installs the package of the page into a folder, as pip would without a network."""
    project = tomllib.loads(_block("toml"))["project"]
    folder = tmp_path / "site"
    metadata = folder / f"nearest_experts-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (folder / "nearest_experts.py").write_text(_block("python"), encoding="utf-8")
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        f"Summary: {project['description']}\n",
        encoding="utf-8",
    )
    (group,) = project["entry-points"]
    rows = "\n".join(f"{name} = {value}" for name, value in project["entry-points"][group].items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{rows}\n", encoding="utf-8")
    return folder


def _python(site, *words):
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_catalogue_names_members_of_an_installed_package(site):
    program = (
        "import sys; from jaxmoe import catalog; from jaxmoe.routing import ROUTERS;"
        " assert list(ROUTERS)[-1] == 'nearest', list(ROUTERS);"
        " assert catalog.line('router', 'nearest').startswith('Routers by distance, sign');"
        " assert 'nearest_experts' not in sys.modules;"
        " assert ROUTERS['nearest'].__module__ == 'nearest_experts'"
    )
    answer = _python(site, "-c", program)
    assert answer.returncode == 0, answer.stderr


def test_an_entry_point_that_is_no_member_names_its_package(site):
    (points,) = site.glob("*/entry_points.txt")
    points.write_text("[jaxmoe.catalog]\nruoter.nearest = nearest_experts:NearestConfig\n")
    answer = _python(site, "-c", "from jaxmoe import catalog; catalog.names('router')")
    assert "the package nearest-experts adds 'ruoter.nearest' to jaxmoe.catalog" in answer.stderr


_COMMANDS = [line.split()[1:] for line in PAGE.splitlines() if line.startswith("jaxmoe pretrain")]


@pytest.mark.slow
def test_a_router_and_an_optimiser_of_an_installed_package_train_and_resume(site, tmp_path):
    command, *flags = _COMMANDS[0]
    directory = tmp_path / "run"
    first = _python(
        site, "-m", "experiments", command, *flags, *SMALL, "--run.directory", str(directory)
    )
    assert first.returncode == 0, first.stderr
    more = _python(
        site, "-m", "experiments", command, "resume", str(directory), "--training.steps", "3"
    )
    assert more.returncode == 0, more.stderr
    assert json.loads((directory / "summary.json").read_text())["steps"] == 3
    config = json.loads((directory / "config.json").read_text())
    router = config["model"]["moe"]["router"]
    assert (router["kind"], router["sharpness"]) == ("nearest", 0.5)
    assert config["optimizer"]["kind"] == "sign"


@pytest.mark.slow
def test_gradients_and_a_run_part_of_an_installed_package_train_and_resume(site, tmp_path):
    command, *flags = _COMMANDS[1]
    directory = tmp_path / "run"
    first = _python(
        site, "-m", "experiments", command, *flags, *SMALL, "--run.directory", str(directory)
    )
    assert first.returncode == 0, first.stderr
    config = json.loads((directory / "config.json").read_text())
    assert config["training"]["gradients"]["kind"] == "noisy"
    assert config["parts"] == [{"kind": "norms", "every": 1}]
    more = _python(
        site, "-m", "experiments", command, "resume", str(directory), "--training.steps", "3"
    )
    assert more.returncode == 0, more.stderr
    logged = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    norms = {one["step"]: one["parameters/norm"] for one in logged if "parameters/norm" in one}
    assert list(norms) == [1, 2, 3]
    largest = [one["gradients/largest_norm"] for one in logged if "gradients/largest_norm" in one]
    assert 0.0 < largest[0] and largest == sorted(largest)  # kept in the checkpoint
    assert json.loads((directory / "summary.json").read_text())["parameter_norm"] == norms[3]
