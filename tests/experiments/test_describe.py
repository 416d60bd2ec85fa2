# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.describe`: sizes, rates, memory, layouts; no device, and a closed pipe."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import pytest

from experiments import describe
from experiments.recipes import RECIPES
from jaxmoe.run.directory import RunDirectory

ROOT = pathlib.Path(__file__).resolve().parents[2]


def page(capsys, *argv):
    """Lines before the table, by their first word."""
    assert describe.main(argv) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    return {line.split()[0]: line for line in lines}


def test_the_page_of_a_large_model(capsys):
    lines = page(capsys, "qwen3_30b_a3b")
    assert lines["parameters"].split()[1:] == [
        "30,532,122,624",
        "total,",
        "3,353,032,704",
        "active",
    ]
    # 12 and 4 bytes for each.
    assert "366.4 GB parameters and optimizer, 122.1 GB gradients" in lines["memory"]


@pytest.fixture
def run(tmp_path):
    """The directory of a run of five layers on one device, of which only the config is there."""
    config = RECIPES["tiny"]()
    model = dataclasses.replace(config.model, num_layers=5)
    directory = RunDirectory(tmp_path / "run")
    with directory.held():
        directory.check_config(dataclasses.replace(config, model=model))
    return str(directory.path)


def test_flags_beside_a_run_are_applied_to_it(run, capsys):
    kept = page(capsys, "--run.directory", run)
    meshed = page(capsys, "--run.directory", run, "--execution.mesh.data", "8")
    assert kept["run"].split(maxsplit=1)[1] == run
    assert meshed["run"].split(maxsplit=1)[1] == f"{run}, with other flags"
    assert meshed["parameters"] == kept["parameters"]
    assert meshed["mesh"].split()[1] == "data=8," != kept["mesh"].split()[1]
    recipe = page(capsys, "tiny", "--model.num_layers", "5")
    assert recipe["parameters"] == kept["parameters"] != page(capsys, "tiny")["parameters"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run.directory", "runs/none"], "run.directory=runs/none holds no run"),
        (["--run.directory=runs/none", "--training.steps", "9"], "runs/none holds no run"),
        (["d8", "--run.directory", "{run}"], "recipe d8 and run.directory={run} both describe"),
    ],
)
def test_a_directory_that_is_not_described_is_refused(words, message, run, capsys):
    with pytest.raises(SystemExit) as stopped:
        describe.main([word.format(run=run) for word in words])
    assert stopped.value.code == 2 and message.format(run=run) in capsys.readouterr().err


def test_the_rate_that_is_trained_with(capsys):
    assert page(capsys, "d8")["learning"].endswith("0.014 at the base point, here 0.014")
    assert page(capsys, "d12")["learning"].endswith("0.014 at the base point, here 0.00828")
    assert page(capsys, "tiny")["learning"].split()[2:3] == ["0.03"]


def test_moments_stay_wide_when_parameters_are_narrow(capsys):
    """2 + 4 bytes (8 for embedding and head) and 2 for each of 926,043,136, on 8 devices."""
    flags = ("--execution.precision.parameters", "bfloat16", "--execution.mesh.data", "8")
    memory = page(capsys, "d8", *flags)["memory"]
    # Gains, 1 part in 50,000, are whole on every device.
    assert "727.5 MB parameters and optimizer, 231.5 MB gradients" in memory


def layouts(capsys, *argv):
    """Rows of the table of layouts: {(parameter, axis): [states..., what is sent]}."""
    assert describe.main(argv) == 0
    rows = capsys.readouterr().out.partition("layouts on each mesh axis")[2].splitlines()[5:]
    found, path = {}, ""
    for row in rows:
        words = row.split(maxsplit=6 if row[0] != " " else 5)
        path = words.pop(0) if row[0] != " " else path
        found[path, words[0]] = [*words[1:5], *words[5:]]
    return found


def test_layouts_and_the_collectives_between_them(capsys):
    mesh = ("--execution.mesh.data", "4", "--execution.mesh.expert", "2")
    rules = ("--execution.rules", "hierarchical", "--execution.mesh.replica", "2")
    spread = ("execution.dispatcher:all-to-all",)
    embedding, expert = "embedding/weight", "moe_blocks_0/moe/experts/down"
    found = layouts(capsys, "tiny", *mesh, *spread)
    assert found[embedding, "data=4"][:4] == ["S(1)", "B", "P", "S(1)"]
    assert re.fullmatch(r"all-gather \S+, reduce-scatter \S+", found[embedding, "data=4"][4])
    assert found[expert, "expert=2"] == ["S(1)", "S(1)", "S(1)", "S(1)"]
    found = layouts(capsys, "tiny", *mesh, "--execution.rules", "zero1")
    assert found[embedding, "data=4"][:4] == ["B", "B", "P", "S(1)"]
    assert re.match(r"reduce-scatter \S+, all-gather \S+", found[embedding, "data=4"][4])
    assert found[expert, "expert=2"][:4] == ["S(1)", "B", "P", "S(1)"]
    found = layouts(capsys, "tiny", *mesh, *rules)
    assert found[embedding, "replica=2"][4].startswith("all-gather 0")
    found = layouts(capsys, "tiny", *mesh, "--execution.rules", "data_parallel")
    assert found[embedding, "data=4"][3] == "B"
    assert found[embedding, "data=4"][4].startswith("all-reduce")


def test_no_table_of_layouts_without_a_mesh(capsys):
    assert describe.main(["tiny"]) == 0
    assert "layouts on each mesh axis" not in capsys.readouterr().out


def test_no_device_and_no_reader():
    """A missing platform would fail when asked for; `describe | head` is no failure."""
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "experiments.describe", "mixtral_8x7b"]
    reading, writing = os.pipe()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(writing)
        os.close(reading)
        _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (0, "")


def test_tables_fit_120_columns_and_their_columns_are_explained(capsys):
    for flags in (("d20",), ("tiny", "--execution.mesh.data", "8")):
        assert describe.main(flags) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 120
    for heading in re.search(r"^path +shape (.*)$", out, re.MULTILINE)[1].split():
        assert re.search(rf"\b{heading}(, decay)?:", out), heading
    assert "layers: heads=tensor, head_dim -> embed=data+expert+seq" in out


def test_stages_and_their_idle_share(capsys):
    flags = ("--execution.mesh.stage", "2", "--execution.mesh.data", "2", "--model.num_layers", "4")
    lines = page(capsys, "tiny", *flags, "--training.accumulation", "4")
    assert lines["stages"].split(maxsplit=1)[1].startswith("2 with 2 layers each; interleaved, 4")
    assert "20% of the time idle, at most 3 inputs kept" in lines["stages"]
    assert "stages" not in page(capsys, "tiny", *flags, "--execution.mesh.stage", "1")
    found = layouts(capsys, "tiny", *flags)
    # Layers and vocabulary stay on their stage; a gain behind the stages is summed over them.
    assert found["moe_blocks_0/attention/q", "stage=2"] == ["S(0)", "S(0)", "S(0)", "S(0)"]
    assert found["head/weight", "stage=2"] == ["S(1)", "S(1)", "S(1)", "S(1)"]
    assert found["final_norm/gain", "stage=2"][:3] == ["B", "B", "P"]


def tiles(capsys, *argv):
    """Rows of the table of tiles: {product: the other words}."""
    assert describe.main(argv) == 0
    part = capsys.readouterr().out.partition("sizes: products of a device")[2]
    return {row.split()[0]: row.split()[1:] for row in part.partition("\n\n")[0].splitlines()[2:]}


def test_widths_are_compared_with_tiles(capsys):
    """Products of `d8` by hand, whole and on tensor=2."""
    found = tiles(capsys, "d8")
    assert found["moe_blocks_0/attention/q"][:5] == ["8", "32768", "1024", "2048", "0.0%"]
    assert found["moe_blocks_0/moe/router/weight"][:5] == ["8", "32768", "1024", "64", "75.0%"]
    mesh = ("--execution.mesh.data", "4", "--execution.mesh.tensor", "2")
    found = tiles(capsys, "d8", *mesh)
    assert found["moe_blocks_0/attention/q"][:5] == ["8", "8192", "1024", "1024", "0.0%"]
    # 4096 tokens of a device whose layers share positions, 7 of 64 experts for each.
    assert found["moe_blocks_0/moe/experts/down"][:5] == ["512", "448", "512", "1024", "12.5%"]
    assert found["head/weight"][:5] == ["1", "8192", "1024", "16000", "0.8%"]
    assert found["head/weight:"] == "16000 not a multiple of 256".split()
    assert "moe_blocks_0/attention/q:" not in found


def test_experts_with_few_rows_are_named(capsys):
    few = ("--training.batch_size", "2", "--training.sequence_length", "256")
    found = tiles(capsys, "d8", *few, "--training.accumulation", "1")
    row = found["moe_blocks_0/moe/experts/down"]
    assert row[1] == "56" and row[4] == "56.2%", "512 tokens, 7 of 64 experts, 56 of 128 rows"
    said = found["moe_blocks_0/moe/experts/down:"]
    assert said == "below 128 rows for an expert".split()
