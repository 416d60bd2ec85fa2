# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.checkpoint convert` to few bits, and evaluate and generate on the result."""

import contextlib
import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import evaluate, generate, pretrain
from experiments.checkpoint import __main__ as checkpoint
from experiments.cli.flags import ExitCode
from jaxmoe.models import decode
from jaxmoe.run.load import load_run
from pallas_kernels import QuantizedArray, dequantize
from tests.support.untrained import untrained_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return untrained_run(tmp_path_factory.mktemp("runs") / "small")


def convert(run, form, *more):
    return checkpoint.main(["convert", "--run.directory", str(run), "--quantise", form, *more])


@pytest.fixture(scope="module")
def converted(run):
    """The converted run, and the printed text."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert convert(run, "w4a16") == ExitCode.DONE
    return run.with_name("small-w4a16"), said.getvalue()


def refused(capsys, function, *arguments):
    with pytest.raises(SystemExit) as stopped:
        function(*arguments)
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    return capsys.readouterr().err


def test_quantised_run_has_files_and_summary(run, converted):
    directory, said = converted
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "converted" and summary["format"] == "w4a16"
    before, after = summary["parameter_bytes_before"], summary["parameter_bytes"]
    assert f"w4a16: parameters {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB" in said
    _, state, _ = load_run(str(run), None)
    _, rounded, _ = load_run(str(directory), None)
    assert before == sum(4 * leaf.size for leaf in jax.tree.leaves(state.params))
    bits = {"int4": 4, "float32": 32}
    assert after == sum(x.size * bits[str(x.dtype)] for x in jax.tree.leaves(rounded.params)) / 8
    assert rounded.opt_state == {} and not list(run.parent.glob("*unfinished*"))

    path = "moe_blocks_0/moe/experts/down"
    value, held = (s.params["moe_blocks_0"]["moe"]["experts"]["down"] for s in (state, rounded))
    assert isinstance(held, QuantizedArray) and held.values.dtype == jnp.int4
    values, scales = (np.asarray(part, np.float32) for part in (held.values, held.scales))
    error = np.abs(values * scales - np.asarray(value)).max()
    assert math.isclose(summary["rounded"][path]["largest_error"], error, rel_tol=1e-5)
    (line,) = (line for line in said.splitlines() if line.startswith(path))
    assert f"{error:.3g}" in line and "1x4x16x32" in line
    assert len(summary["rounded"]) == 6
    assert not [name for name in summary["rounded"] if "head" in name or "router" in name]


def test_evaluate_reports_cache_rounding(converted, capsys):
    directory, _ = converted
    assert evaluate.main(["--run.directory", str(directory), "--cache", "int4"]) == ExitCode.DONE
    line = capsys.readouterr().out
    # One layer, two heads, keys and values: 16 numbers of 4 bits and a scale.
    assert line.strip().endswith(f"weights=w4a16 cache=int4 cache_bytes_per_token={4 * (8 + 4)}")
    bits = float(line.split("eval/bits_per_token=")[1].split()[0])
    # A fresh model is this much worse than knowing nothing of 16 tokens.
    assert 4.0 < bits < 5.0


@pytest.mark.slow
def test_generate_equals_dequantised_weights(converted, capsys):
    directory, _ = converted
    assembly, state, _ = load_run(str(directory), None)
    prompt = jnp.asarray([assembly.source.encode("1 2 3")], jnp.int32)
    turned = jax.tree.map(
        lambda leaf: dequantize(leaf) if isinstance(leaf, QuantizedArray) else leaf,
        jax.tree.map(jnp.asarray, jax.device_get(state.params)),
        is_leaf=lambda leaf: isinstance(leaf, QuantizedArray),
    )
    wanted = decode.generate(
        assembly.plan.model,
        turned,
        prompt,
        num_tokens=8,
        key=jax.random.key(0),
        temperature=0.0,
    )
    arguments = ("--run.directory", str(directory), "--prompt", "1 2 3", "--length", "8")
    assert generate.main([*arguments, "--temperature", "0"]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert said.startswith("weights=w4a16\n")
    assert assembly.source.decode(np.asarray(wanted)[0]) in said


def test_bad_convert_requests_are_refused(run, converted, tmp_path, capsys):
    def words(*arguments):
        return refused(capsys, checkpoint.main, list(arguments))

    directory, _ = converted
    here = ("convert", "--run.directory", str(run))
    again = ("convert", "--run.directory", str(directory), "--quantise", "w8a8")
    assert f"{directory} is converted already, to w4a16: convert the" in words(*again)
    assert "small-w4a16 exists already: remove it" in words(*here, "--quantise", "w4a16")
    assert "convert needs a target: give --quantise w4a8, w8a8" in words(*here)
    assert "w4a8" in words(*here, "--quantise", "w2a2")
    empty = ("convert", "--run.directory", str(tmp_path), "--to", str(tmp_path / "new"))
    assert "holds no run (config.json is missing)" in words(*empty, "--quantise", "w4a8")
    assert "unknown command 'converts': did you mean 'convert'?" in words("converts")
    assert checkpoint.main([]) == ExitCode.BAD_CONFIGURATION
    assert checkpoint.main(["--help"]) == ExitCode.DONE
    assert "convert  Converts a run to 8 or 4 bits" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_quantised_run_is_not_trained(converted, tmp_path, capsys):
    directory, _ = converted
    kept = (directory / "config.json").read_text()
    arguments = ["markov", "--run.directory", str(directory)]
    said = refused(capsys, pretrain.main, arguments)
    assert "holds a run whose weights were rounded to w4a16, for inference: train the one" in said
    assert (directory / "config.json").read_text() == kept
    arguments = ["markov", "--run.directory", str(tmp_path / "new")]
    said = refused(capsys, pretrain.main, [*arguments, "--execution.precision.weights", "w4a8"])
    assert "execution.precision.weights='w4a8' is for inference, and training needs" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.large
@pytest.mark.trains
@pytest.mark.slow
def test_four_bits_lose_little_accuracy(tmp_path, capsys):
    """`tiny` after 100 steps: 4 bits of weights and cache cost at most 0.05 bits per byte."""
    run = tmp_path / "tiny"
    brief = ("--training.steps", "100", "--evaluation.every", "0", "--tracking.sample_length", "0")
    assert pretrain.main(["tiny", "--run.directory", str(run), *brief]) == ExitCode.DONE
    trained = json.loads((run / "summary.json").read_text())["eval_bits_per_byte"]
    assert trained < 3.53, "better than counting single bytes"
    assert convert(run, "w4a8") == ExitCode.DONE
    capsys.readouterr()
    in_few = ["--run.directory", str(run.with_name("tiny-w4a8")), "--cache", "int4"]
    assert evaluate.main(in_few) == ExitCode.DONE
    found = float(capsys.readouterr().out.split("eval/bits_per_byte=")[1].split()[0])
    assert 0.0 < abs(found - trained) and found - trained <= 0.05
