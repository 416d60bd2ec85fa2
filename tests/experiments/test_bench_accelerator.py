# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe bench accelerator`: parts in processes, their limits, and the table."""

import json
import pathlib
import time

import pytest

from experiments.bench import __main__ as bench
from experiments.bench.accelerator import command
from experiments.bench.accelerator.profiled import kind_of
from experiments.bench.accelerator.schedule import BenchPart, run_alone, run_together

PART = "tests.support.accelerator_part"


def part_of(fault, **fields):
    fields = {"seconds": 60, "compile_seconds": 60} | fields
    return BenchPart(name=fault, module=PART, line="", options={"fault": fault}, **fields)


def outcomes_of(parts, directory, *, seconds=120.0):
    until = time.monotonic() + seconds
    together = run_together(parts, directory, is_tiny=True, workers=2, until=until)
    alone = run_alone(parts, directory, is_tiny=True, until=until)
    return {(one.part, one.phase): one for one in (*together, *alone)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    faults = [part_of(fault) for fault in ("none", "fails", "dies")]
    hanging = part_of("hangs", seconds=4, compile_seconds=4)
    return outcomes_of([*faults, hanging], tmp_path_factory.mktemp("parts"))


@pytest.mark.parametrize("phase", ["compile", "measure"])
@pytest.mark.parametrize("fault", ["none", "fails", "dies", "hangs"])
def test_rows_of_a_part_survive_what_becomes_of_it(outcomes, fault, phase):
    found = outcomes[fault, phase]
    assert found.rows == [{"case": "planted", "name": fault, "phase": phase}]
    wanted = {
        "none": None,
        "fails": "ended with code 1",
        "dies": "ended with code 3",
        "hangs": "stopped after 4 s",
    }[fault]
    assert (found.error or "").splitlines()[:1] == ([wanted] if wanted else [])
    if fault == "fails":
        assert "RuntimeError: planted" in found.error
    if fault == "hangs":
        assert found.seconds < 20


def test_a_part_for_which_no_time_is_left_is_named(tmp_path):
    found = outcomes_of([part_of("none")], tmp_path, seconds=0.0)
    assert {one.error for one in found.values()} == {"left out: no time"}


def test_the_parts_are_listed(capsys):
    assert bench.main(["accelerator", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in command.PARTS]


@pytest.mark.parametrize("words", [["--parts", "stepp"], ["--minutes", "0"], ["--workers", "0"]])
def test_bad_input_is_refused(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["accelerator", *words])
    assert stopped.value.code == 2
    assert words[0].strip("-") in capsys.readouterr().err


def test_every_part_has_a_module_and_time():
    root = pathlib.Path(command.__file__).parent
    for part in command.PARTS:
        assert (root / f"{part.module.rsplit('.', 1)[1]}.py").is_file()
        assert part.seconds > 0
        assert part.is_measured or part.compile_seconds


def test_the_command_writes_what_it_learned(tmp_path, capsys):
    words = ["--parts", "machine", "--run.directory", str(tmp_path), "--minutes", "3"]
    assert bench.main(["accelerator", *words]) == 0
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "accelerator.json").read_text())
    assert written["is_tiny"] is True
    assert [one["phase"] for one in written["outcomes"]] == ["compile", "measure"]
    names = [row["name"] for one in written["outcomes"] for row in one["rows"]]
    assert names.count("JAX bfloat16") == 2
    assert "TFLOP/s" in out
    assert out.count("JAX bfloat16") == 1


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path, capsys):
    """Parts of PyTorch and transformers say so where these are absent."""
    words = ["--run.directory", str(tmp_path), "--minutes", "30", "--workers", "1"]
    assert bench.main(["accelerator", *words]) == 0
    outcomes = json.loads((tmp_path / "accelerator.json").read_text())["outcomes"]
    assert {one["part"] for one in outcomes} == {part.name for part in command.PARTS}
    assert [one for one in outcomes if one["error"]] == []
    rows = [row for one in outcomes for row in one["rows"] if "error" in row]
    assert all("MissingPackageError" in str(row["error"]) for row in rows if row["error"])
    assert "repeats bitwise" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("body_mosaic_gpu_kernel", "ours"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "library products"),
        ("input_concatenate_fusion", "concatenations"),
        ("loop_dynamic_update_slice_fusion", "stacking by loops"),
        ("loop_select_fusion", "selects"),
        ("input_add_reduce_fusion", "sums"),
        ("wrapped_convert", "conversions"),
        ("input_scatter_fusion", "gathers and scatters"),
        ("loop_rsqrt_fusion", "other"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert kind_of(kernel) == kind
