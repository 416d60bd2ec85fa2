# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.ensemble`: members, their mixture and summary, and what it refuses."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest

from experiments import ensemble, pretrain
from experiments.doctor.devices import tiny_config
from jaxmoe.contrib.ensembles.clusters import Clusters
from jaxmoe.contrib.ensembles.evaluate import evaluate_ensemble
from jaxmoe.contrib.ensembles.members import checked_partition, open_members
from jaxmoe.contrib.ensembles.partition import ClusterPartConfig
from jaxmoe.data import LanguageMixtureConfig, MarkovConfig
from jaxmoe.run import Run
from jaxmoe.run.assemble import assemble
from jaxmoe.run.directory import RunDirectory
from tests.support.runs import SMALL

LANGUAGES = LanguageMixtureConfig(num_languages=3, partition=ClusterPartConfig(part="1/3"))
STEPS = 40


def member_flags(directory, part, steps=STEPS):
    chosen = ("languages", *SMALL[1:], "--run.directory", str(directory))
    data = ("--data.num_languages", "3", "--data.partition.part", part, "--evaluation.batches", "8")
    return [*chosen, *data, "--training.steps", str(steps), "--model.vocab_size", "24"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Runs on the three parts of three languages, of equal steps."""
    folder = tmp_path_factory.mktemp("parts")
    paths = [folder / f"part{number}" for number in (1, 2, 3)]
    for number, path in enumerate(paths, 1):
        assert pretrain.main(member_flags(path, f"{number}/3")) == 0
    return [str(path) for path in paths]


@pytest.mark.slow
@pytest.mark.trains
def test_the_ensemble_beats_its_best_member(parts, tmp_path, capsys):
    capsys.readouterr()
    where = ["--run.directory", str(tmp_path / "ensemble")]
    assert ensemble.main(["--runs", *parts, *where]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert [line.split()[0] for line in lines[1:4]] == ["part1", "part2", "part3"]
    assert any(line.startswith("ensemble - best member: -") for line in lines)
    summary = json.loads((tmp_path / "ensemble" / "summary.json").read_text())
    assert summary["status"] == "done" and summary["top"] == 2
    assert (summary["batches"], summary["calibration_batches"]) == (6, 2)
    assert [member["part"] for member in summary["members"]] == ["1/3", "2/3", "3/3"]
    assert {member["step"] for member in summary["members"]} == {STEPS}
    assert summary["ensemble_bits_per_byte"] is None
    best = min(member["bits_per_token"] for member in summary["members"])
    assert summary["best_member_bits_per_token"] == best
    floor, mixed = summary["entropy_bits_per_token"], summary["ensemble_bits_per_token"]
    assert floor < mixed < summary["uniform_bits_per_token"] < best
    assert mixed < best - 1.0, (mixed, best)
    # The mean of n probabilities costs at most log2(n) bits more than its best member, token by
    # token; the router has to find most of them.
    assert summary["uniform_bits_per_token"] - mixed > 0.5 * math.log2(3)
    assert (tmp_path / "ensemble" / "plots" / "positions.png").stat().st_size > 1000
    kept = [Clusters.read(RunDirectory(path).partition_file).digest() for path in parts]
    assert set(kept) == {summary["centroids"]}


@pytest.mark.slow
@pytest.mark.trains
def test_equal_runs_and_single_runs_give_the_loss_of_the_run(parts, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(parts[0], copy)
    alone = Run.open(parts[0]).evaluate().bits_per_token
    for paths in ([parts[0]], [parts[0], str(copy)]):
        result = evaluate_ensemble(open_members(paths), temperature=0.1)
        assert result.member_bits[0] == pytest.approx(alone, abs=1e-5)
        assert result.routed_bits == pytest.approx(result.member_bits[0], abs=1e-6)
        assert result.uniform_bits == pytest.approx(result.member_bits[0], abs=1e-6)
    with pytest.raises(SystemExit) as stopped:
        ensemble.main(["--runs", *parts, "--run.directory", parts[0]])
    assert stopped.value.code == 2
    assert "holds a run, whose summary.json would be lost" in capsys.readouterr().err


def config_of(data, sequence_length=None):
    config = tiny_config(len(jax.devices()))
    model = dataclasses.replace(config.model, vocab_size=32)
    training = config.training
    if sequence_length is not None:
        training = dataclasses.replace(training, sequence_length=sequence_length)
    return dataclasses.replace(config, model=model, data=data, training=training)


def untrained(path, config):
    """A run directory with a configuration and nothing else."""
    with RunDirectory(path).held():
        RunDirectory(path).check_config(config)
    return str(path)


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        ensemble.main(list(words))
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_runs_that_are_no_members_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plain = untrained("plain", config_of(dataclasses.replace(LANGUAGES, partition=None)))
    markov = untrained("markov", config_of(MarkovConfig()))
    one = untrained("one", config_of(LANGUAGES))
    other = dataclasses.replace(LANGUAGES, partition=ClusterPartConfig(part="2/3"))
    length = config_of(other).training.sequence_length
    longer = untrained("longer", config_of(other, 2 * length))
    for name, kind in ((plain, "language_mixture"), (markov, "markov")):
        assert refusal(capsys, "--runs", one, name) == (
            f"error: {name} was trained on all of its data (data:{kind}), and has no part to be"
            " routed by: train each member with --data.partition.part 1/4 and so on\n"
        )
    assert refusal(capsys, "--runs", one, longer) == (
        f"error: longer has training.sequence_length={2 * length}, and one {length}: an ensemble"
        " predicts the same tokens from the same rows\n"
    )
    assert refusal(capsys, "--runs", one, one) == "error: a run is named twice: one, one\n"
    assert refusal(capsys).startswith("error: no run is given: name the run directories of the")
    assert "holds no run (config.json is missing)" in refusal(capsys, "--runs", "nothing")
    assert "top=0 must be at least 1" in refusal(capsys, "--runs", one, "--top", "0")
    assert "holds no checkpoints: the directory does not exist" in refusal(capsys, "--runs", one)


def test_members_share_vocabulary_data_and_centroids(tmp_path):
    first = assemble(config_of(LANGUAGES))
    for changed, message in (
        (
            {"num_languages": 2, "partition": ClusterPartConfig(part="1/2")},
            "b has a vocabulary of 16 ids, and a of 24: an ensemble needs one tokenizer",
        ),
        (
            {"language_seed": 1},
            "the runs were trained on other data:\n  language_seed: 0 in a, 1 in b\n  sha256: ",
        ),
        ({"partition": ClusterPartConfig(part="1/2")}, "b is part 1 of 2 with centroids "),
    ):
        other = assemble(config_of(dataclasses.replace(LANGUAGES, **changed)))
        with pytest.raises(ValueError) as refused:
            checked_partition("b", other, "a", first)
        assert str(refused.value).startswith(message)
    assert str(refused.value).endswith(": the members of an ensemble share one partition")
    second = assemble(
        config_of(dataclasses.replace(LANGUAGES, partition=ClusterPartConfig(part="2/3")))
    )
    assert str(checked_partition("b", second, "a", first)) == "2/3"


def test_the_centroids_of_a_member_are_those_that_its_directory_keeps(tmp_path):
    first = assemble(config_of(LANGUAGES))
    partition = checked_partition(str(tmp_path), first, "a", first)
    moved = Clusters(centroids=partition.clusters.centroids + np.float64(0.001))
    RunDirectory(tmp_path).partition_file.write_bytes(moved.to_bytes())
    with pytest.raises(ValueError, match="is part 1 of 3 with centroids .*share one partition"):
        checked_partition(str(tmp_path), first, "a", first)
