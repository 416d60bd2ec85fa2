# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Processes agree on the kernels that they do not use."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import recipes
from jaxmoe import kernel_choices
from jaxmoe.contrib.few_bits.halo import HaloConfig
from jaxmoe.kernel_choices import KernelsConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.run.assemble import assemble
from pallas_kernels import OPERATIONS
from pallas_kernels.proof import CASES, KERNELS, Verdict
from sharding import MeshConfig, make_mesh


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Nothing has been compared."""
    monkeypatch.setattr(kernel_choices, "_VERDICTS", {})


@pytest.mark.parametrize("asked", [None, "xla"])
def test_a_kernel_that_another_process_found_wrong_is_not_used(monkeypatch, asked):
    config, distrusted = KernelsConfig(attention=asked), []

    def prove(names, directory=None):
        return [Verdict(operation=name, implementation="pallas_gpu", error=0.001) for name in names]

    def gather(values):
        other = values.copy()
        other[KERNELS.index("pallas_gpu")] = 1
        return np.stack([values, other])

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for function in (prove, gather):
        monkeypatch.setattr(kernel_choices, function.__name__, function)
    monkeypatch.setattr(kernel_choices, "distrust", lambda *words: distrusted.append(words))
    config._prove(is_shared=True)
    first = min(name for name in CASES if asked is None or name != "flash_attention")
    assert distrusted == [(first, "pallas_gpu", f"another process found {first} wrong")]
    config._prove(is_shared=False)
    assert len(distrusted) == 1, "a process that computes alone waits for no other"


@pytest.mark.parametrize("name", OPERATIONS["flash_attention"].implementations)
def test_attention_that_has_no_pages_leaves_them_to_the_default(name):
    choice = KernelsConfig(attention=name).by_operation
    has_pages = name in OPERATIONS["paged_attention"].implementations
    assert choice["flash_attention"] == name
    assert choice["paged_attention"] == (name if has_pages else None)


def test_pages_are_read_by_serving_alone(monkeypatch):
    compared = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        kernel_choices, "prove", lambda names, directory: compared.append(names) or []
    )
    KernelsConfig().prepare(None)
    KernelsConfig().prepare(None, serves=True)
    training, serving = map(set, compared)
    assert serving == {"paged_attention"} and training | serving == set(CASES)


def test_a_run_compares_what_its_products_call(monkeypatch):
    """Three kernels of products in few bits would take a start longer than compiling the step."""
    compared = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        kernel_choices, "prove", lambda names, directory: compared.append(set(names)) or []
    )
    config = recipes.markov(steps=2, batch_size=8, sequence_length=16)
    few = dataclasses.replace(config.execution, precision=PrecisionPolicy(matmul=HaloConfig()))
    for execution in (config.execution, few):
        kernel_choices._VERDICTS.clear()
        assemble(dataclasses.replace(config, execution=execution), needs_data=False)
    assert compared[0] == {"flash_attention", "grouped_swiglu"}
    assert compared[1] == set(CASES) - {"paged_attention"}


def test_a_process_compares_once_whatever_the_mesh(monkeypatch):
    """As when a server moves to another mesh; verdicts need no directory."""
    compared = []

    def prove(names, directory=None):
        compared.extend(names)
        return [Verdict(operation=name, implementation="pallas_gpu", error=0.001) for name in names]

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernel_choices, "prove", prove)
    for devices in (1, 2, 4):
        mesh = make_mesh(MeshConfig(data=devices), jax.devices()[:devices])
        KernelsConfig().prepare_once(mesh)
    KernelsConfig().prepare(None)
    assert sorted(compared) == sorted(CASES)
    KernelsConfig(attention="xla").prepare(None)
    assert len(compared) == len(CASES)
