# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels are found before they are used: planted faults in what XLA runs on the CPU."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from pallas_kernels import OPERATIONS, backend, proof
from pallas_kernels.flash_attention import api as attention_api
from pallas_kernels.grouped_matmul import api as matmul_api
from pallas_kernels.grouped_swiglu import api as swiglu_api
from pallas_kernels.paged_attention import api as paged_api
from pallas_kernels.quantized_matmul import api as quantized_api

HOMES = {
    "flash_attention": (attention_api, "OPERATION"),
    "grouped_matmul": (matmul_api, "OPERATION"),
    "grouped_outer": (matmul_api, "OUTER"),
    "grouped_swiglu": (swiglu_api, "OPERATION"),
    "paged_attention": (paged_api, "OPERATION"),
    "quantized_matmul": (quantized_api, "OPERATION"),
}

FAULTS = {
    "scaled": lambda run: lambda *a, **k: _first(run(*a, **k), lambda x: 1.1 * x),
    "one_row_not_written": lambda run: (
        lambda *a, **k: _first(run(*a, **k), lambda x: x.at[0].set(jnp.nan))
    ),
    "fails": lambda run: lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no such layout")),
}


def _first(result, change):
    """A change of the value alone, of the log-sum-exp nothing."""
    if isinstance(result, tuple):
        return change(result[0]).astype(result[0].dtype), *result[1:]
    return change(result).astype(result.dtype)


def plant(monkeypatch, name, change):
    """Make "pallas_gpu" of an operation a changed "xla" that runs here and is chosen."""
    module, attribute = HOMES[name]
    operation = OPERATIONS[name]
    kernels = {**operation.implementations, "pallas_gpu": change(operation.implementations["xla"])}
    planted = dataclasses.replace(operation, implementations=kernels, refusals={})
    monkeypatch.setattr(module, attribute, planted)
    monkeypatch.setitem(backend.PLATFORMS, "pallas_gpu", "cpu")
    monkeypatch.setattr(backend, "_WRONG", {})
    return {name: planted}


@pytest.mark.parametrize("name", HOMES)
def test_the_implementation_of_xla_is_right(name):
    verdict = proof.compare(name, "xla")
    assert verdict.is_right and 0.0 <= verdict.error < 0.02, str(verdict)
    assert set(HOMES) == set(proof.CASES)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", HOMES)
def test_a_wrong_kernel_is_not_chosen(monkeypatch, name, fault):
    operations = plant(monkeypatch, name, FAULTS[fault])
    assert operations[name].choose().implementation == "pallas_gpu"
    with pytest.warns(UserWarning, match=f"{name}: pallas_gpu (differs from|failed)"):
        verdicts = proof.prove([name], scales=(1,), operations=operations)
    assert [one.case for one in verdicts] == [*proof.CASES[name]]
    assert not any(one.is_right for one in verdicts)
    choice = operations[name].choose()
    assert choice.implementation == "xla" and "not pallas_gpu" in choice.reason


def test_verdicts_are_kept(monkeypatch, tmp_path):
    name, calls = "quantized_matmul", []

    def counted(run):
        def counting(*args, **options):
            calls.append(1)
            return run(*args, **options)

        return counting

    operations = plant(monkeypatch, name, counted)
    (first,) = proof.prove([name], directory=tmp_path, scales=(1,), operations=operations)
    number = len(calls)
    assert first.is_right and number
    (second,) = proof.prove([name], directory=tmp_path, scales=(1,), operations=operations)
    assert second == first and len(calls) == number
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    (third,) = proof.prove([name], directory=tmp_path, scales=(1,), operations=operations)
    assert third == first and len(calls) > number


def test_nothing_is_compared_where_no_kernel_is_chosen():
    assert proof.prove() == []


def test_a_failure_is_not_remembered(monkeypatch, tmp_path):
    """It may have lacked memory that another process held; a difference stays one."""
    name = "quantized_matmul"
    for fault, kept in (("fails", 0), ("scaled", 1)):
        monkeypatch.setattr(backend, "_WRONG", {})
        operations = plant(monkeypatch, name, FAULTS[fault])
        with pytest.warns(UserWarning, match="no longer chooses it"):
            proof.prove([name], directory=tmp_path, scales=(1,), operations=operations)
        (path,) = tmp_path.iterdir()
        assert len(json.loads(path.read_text())) == kept


def test_a_comparison_runs_on_a_device_of_its_process(monkeypatch):
    """The first of all devices may belong to another process."""

    def of_all_processes(*_):
        raise AssertionError("the devices of all processes were asked for")

    monkeypatch.setattr(proof.jax, "devices", of_all_processes)
    assert proof.compare("quantized_matmul", "xla", scales=(1,)).is_right
