# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.doctor`: a healthy machine, and each illness that it knows."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxmoe.precision
from experiments.cli.flags import ExitCode
from experiments.cli.output import write
from experiments.doctor import __main__ as doctor
from experiments.doctor import devices as doctor_devices
from experiments.doctor import links as doctor_links
from experiments.doctor import software as doctor_software
from experiments.doctor.software import Finding, coordinator, plugin_versions, variables, writable
from jaxmoe.contrib.survival.links.probe import LinkProbe
from jaxmoe.planning.network.links import LinkTable
from jaxmoe.planning.network.measured import host_bandwidth

ROOT = pathlib.Path(__file__).resolve().parents[2]


def levels(findings):
    return [finding.level for finding in findings]


def only_problem(findings) -> Finding:
    (problem,) = [finding for finding in findings if finding.level == "problem"]
    assert problem.remedy
    return problem


@pytest.mark.large
def test_a_healthy_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor_software, "EXTRAS", {"train": ("numpy",)})
    monkeypatch.setattr(doctor, "start_process", lambda **_: None)
    assert doctor.main(["--run.directory", str(tmp_path / "d")]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("no problems")
    text = "\n".join(lines)
    for words in (
        "8 x cpu",
        "data=8",
        "products in float32",
        "psum, all_gather, all_to_all, ppermute agree with numpy over 8",
        "ragged_all_to_all does not exist on cpu",
        "flash_attention: xla, the fastest one",
        "grouped_matmul: xla",
        "a tiny model trains: loss",
        f"jax {jax.__version__}",
    ):
        assert words in text, words
    summary = json.loads((tmp_path / "d" / "summary.json").read_text())
    assert summary["status"] == "done" and summary["problems"] == 0
    assert len(summary["findings"]) == len(lines) - 1
    assert (tmp_path / "d" / "environment.json").exists()


def test_help_touches_no_device():
    script = (
        "import sys; from experiments.doctor import __main__ as doctor\n"
        "try: doctor.main(['--help'])\n"
        "except SystemExit as stopped: assert stopped.code == 0\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "--run.directory" in run.stdout


def test_problems_before_devices_leave_the_devices_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:8476")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setattr(doctor, "examine_devices", lambda: pytest.fail("devices were touched"))
    code = doctor.main(["--run.directory", str(tmp_path / "d")])
    assert code == ExitCode.BAD_CONFIGURATION
    printed = capsys.readouterr().out
    assert "this very host, for 4 processes" in printed and "not examined" in printed
    assert json.loads((tmp_path / "d" / "summary.json").read_text())["status"] == "problems"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, None),
        ({"JAX_COORDINATOR_ADDRESS": "localhost:1234"}, None),  # one process may meet itself
        ({"SLURM_NTASKS": "8"}, None),
        (
            {"JAX_COORDINATOR_ADDRESS": "localhost:1234", "SLURM_JOB_NUM_NODES": "2"},
            "this very host",
        ),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "[::1]:1234",
                "JAX_NUM_PROCESSES": "2",
                "TPU_WORKER_HOSTNAMES": "a,b",
            },
            "this very host",
        ),
        ({"JAX_COORDINATOR_ADDRESS": "node0"}, "is not host:port"),
        ({"JAX_COORDINATOR_ADDRESS": "node0:99999"}, "is not host:port"),
        ({"JAX_COORDINATOR_ADDRESS": "no-such-host.invalid:1234"}, "cannot be resolved"),
    ],
)
def test_coordinators(environment, words):
    findings = coordinator(environment)
    if words is None:
        assert levels(findings) == ["ok"]
    else:
        assert words in only_problem(findings).text


def test_several_processes_may_meet_on_one_host():
    (finding,) = coordinator({"JAX_COORDINATOR_ADDRESS": "localhost:1234", "SLURM_NTASKS": "2"})
    assert finding.level == "warning" and "unless all of them run here" in finding.remedy


def test_versions_that_do_not_fit():
    good = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2.1"}
    assert levels(plugin_versions(good, {})).count("problem") == 0
    newer = only_problem(plugin_versions({"jax": "0.10.1", "jaxlib": "0.10.2"}, {}))
    assert "jaxlib 0.10.2 is newer than jax 0.10.1" in newer.text
    older = plugin_versions({"jax": "0.10.2", "jaxlib": "0.10.0"}, {})
    assert "warning" in levels(older) and "problem" not in levels(older)
    plugin = only_problem(plugin_versions({**good, "jax-cuda13-pjrt": "0.9.0"}, {}))
    assert "jax-cuda13-pjrt 0.9.0 does not fit jaxlib 0.10.2" in plugin.text
    assert plugin.remedy == "pip install 'jax[cuda13]==0.10.2'"


def test_an_amd_driver_without_its_plugin_is_a_warning(monkeypatch, tmp_path):
    rows = [
        (vendor, str(tmp_path / vendor), *rest) for vendor, _, *rest in doctor_software._DRIVERS
    ]
    monkeypatch.setattr(doctor_software, "_DRIVERS", rows)
    installed = {"jax": "0.10.2", "jaxlib": "0.10.2"}
    assert levels(plugin_versions(installed, {})) == []
    (tmp_path / "AMD").touch()
    (warning,) = plugin_versions(installed, {})
    assert "the driver of AMD and JAX has no ROCM plugin" in warning.text
    rocm = {**installed, "jax-rocm7-plugin": "0.10.2"}
    assert levels(plugin_versions(rocm, {})) == ["ok"]
    assert levels(plugin_versions(rocm, {"JAX_PLATFORMS": "cpu"})) == ["ok", "warning"]
    wrong = only_problem(plugin_versions({**rocm, "jax-rocm7-pjrt": "0.9.0"}, {}))
    assert wrong.remedy == "pip install jax-rocm7-plugin==0.10.2 jax-rocm7-pjrt==0.10.2"


def test_two_variables_that_choose_amd_gpus_are_a_warning():
    both = {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}
    assert levels(variables(both)) == ["ok", "warning"]
    assert levels(variables({"HIP_VISIBLE_DEVICES": "1"})) == ["ok"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--xla_a=1 --xla_b", None),
        ("xla_a=1", "takes 'xla_a=1' for a file"),
        ("--xla_a = 1", "ends a process whose flags it does not know"),
    ],
)
def test_flags_of_xla(flags, words):
    findings = variables({"XLA_FLAGS": flags})
    if words is None:
        assert levels(findings) == ["ok"]
    else:
        assert words in only_problem(findings).text
    assert levels(variables({"XLA_FLAGS": "--xla_a=1 --xla_a=2"})) == ["ok", "warning"]


def test_missing_extras(monkeypatch):
    extras = {"train": ("no_such_module",), "hf": ("no_such_module",), "plan": ("json",)}
    monkeypatch.setattr(doctor_software, "EXTRAS", extras)
    findings = list(doctor_software.extras())
    assert levels(findings) == ["problem", "ok", "ok"]
    assert findings[0].remedy == "pip install 'jaxmoe[train]'"


def test_disks(tmp_path, monkeypatch):
    assert levels(writable(tmp_path / "not" / "yet", "disk"))[0] in ("ok", "warning")
    assert not (tmp_path / "not").exists()

    class Usage:
        free = 10**8

    monkeypatch.setattr(doctor_software.shutil, "disk_usage", lambda _: Usage)
    assert "0.1 GB free" in only_problem(writable(tmp_path, "disk")).text

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor_software.tempfile, "TemporaryFile", full)
    assert "cannot be written (No space left" in only_problem(writable(tmp_path, "disk")).text


@pytest.mark.parametrize(
    ("platform", "is_fast", "words"),
    [
        ("cpu", False, "float32: bfloat16 is not faster"),
        ("cpu", True, "bfloat16: this processor has"),
        ("gpu", False, "bfloat16: as on every accelerator"),
    ],
)
def test_the_dtype_of_products_is_said_with_its_reason(monkeypatch, platform, is_fast, words):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jaxmoe.precision, "multiplies_bfloat16_fast", lambda: is_fast)
    (line,) = doctor_devices.precision()
    assert f"products in {words}" in line.text


def test_a_collective_that_lies_or_fails_is_a_problem():
    given = np.ones((2, 2), np.float32)
    assert doctor_devices.compare("psum", jax.numpy.asarray, given, given) is None
    lie = doctor_devices.compare("psum", lambda x: jax.numpy.zeros(x.shape), given, given)
    assert lie is not None and "gives other numbers than numpy on 4 places" in lie.text

    def fail(_):
        raise RuntimeError("UNIMPLEMENTED: no such thing\nand a long story")

    failed = doctor_devices.compare("psum", fail, given, given)
    assert failed is not None and failed.text == "psum fails: UNIMPLEMENTED: no such thing"


def test_devices_that_do_not_start_are_a_problem(monkeypatch, tmp_path, capsys):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(doctor_devices.jax, "devices", fail)
    findings = doctor_devices.examine_devices()
    assert "no backend starts: Unable to initialize" in only_problem(findings).text


def test_processes_that_cannot_join_are_a_problem(monkeypatch, tmp_path, capsys):
    def fail(**_):
        raise ValueError("Number of processes must be defined.")

    monkeypatch.setattr(doctor, "start_process", fail)
    code = doctor.main(["--run.directory", str(tmp_path / "d")])
    assert code == ExitCode.BAD_CONFIGURATION
    assert "cannot join: Number of processes must be defined." in capsys.readouterr().out


@pytest.mark.parametrize("config", [doctor.DoctorConfig, doctor_links.LinksConfig])
@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf")])
def test_a_timeout_that_no_thread_can_wait_for_is_refused(config, seconds):
    with pytest.raises(ValueError, match=f"timeout={seconds:g} must be above 0 seconds, and at"):
        config(timeout=seconds)


def test_devices_that_hang_end_the_process(tmp_path):
    script = (
        "import time; from experiments.doctor import __main__ as doctor\n"
        "with doctor.answer_within(0.2): time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == ExitCode.BAD_CONFIGURATION
    assert "no answer within 0.2 s" in run.stdout


def test_a_closed_pipe_does_not_change_the_exit_code():
    script = "from experiments.cli.output import write\nfor _ in range(20000): write('x' * 80)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f'{sys.executable} -c "{script}" | head -1; exit ${{PIPESTATUS[0]}}'
    run = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_write_prints(capsys):
    write("a\nb")
    assert capsys.readouterr().out == "a\nb\n"


def test_links_are_measured_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor_links, "start_process", lambda **_: None)
    flags = ["--links", "--mesh.data", "4", "--mesh.tensor", "2", "--message_bytes", "65536"]
    flags += ["--repeats", "2", "--measurements", "1", "--run.directory", str(tmp_path / "d")]
    assert doctor.main(flags) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert "data=4: 8 links, latency " in lines[0] and "tensor=2: 8 links" in lines[1]
    assert "no device and no link is slow" in lines[-2]
    table = LinkTable.load(tmp_path / "d" / "links.json")
    assert len(table.links) == 16 and table.large_bytes == 65536
    data = table.axis_rate("data")
    assert data is not None and data.bandwidth > 0
    assert json.loads((tmp_path / "d" / "summary.json").read_text())["status"] == "done"


def test_pairs_of_processes_are_measured_on_request(tmp_path, monkeypatch):
    """One process here: no pair, and the table of hosts has one entry."""
    monkeypatch.setattr(doctor_links, "start_process", lambda **_: None)
    flags = ["--links", "--pairs", "processes", "--message_bytes", "1024", "--repeats", "1"]
    flags += ["--measurements", "1", "--run.directory", str(tmp_path / "d")]
    doctor.main(flags)
    table = LinkTable.load(tmp_path / "d" / "links.json")
    assert {link.axis for link in table.links} == {"data"}
    assert host_bandwidth(table).shape == (1, 1)


def test_a_slow_link_is_a_problem(tmp_path, capsys, monkeypatch):
    measure = LinkProbe.measure

    def with_slow_link(self):
        matrix = measure(self)
        seconds = np.full(matrix.seconds.shape, 1e-3)
        seconds[1, 3] = 1.0
        return dataclasses.replace(matrix, seconds=seconds)

    monkeypatch.setattr(doctor_links, "start_process", lambda **_: None)
    monkeypatch.setattr(LinkProbe, "measure", with_slow_link)
    flags = ["--links", "--message_bytes", "1024", "--repeats", "1"]
    code = doctor.main([*flags, "--run.directory", str(tmp_path / "d")])
    assert code == ExitCode.BAD_CONFIGURATION
    out = capsys.readouterr().out
    assert "link 3 -> 4 on the axis data is slow" in out and "1000.0 times as long" in out
    summary = json.loads((tmp_path / "d" / "summary.json").read_text())
    assert summary["status"] == "problems" and len(summary["findings"]) == 2
