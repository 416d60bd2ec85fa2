# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests the choice of an implementation, and the refusal of those that cannot run."""

import functools
import inspect
import os
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import backend
from pallas_kernels.backend import Choice, Operation, platform
from pallas_kernels.deferred import DeferredProduct
from pallas_kernels.interpreter import interpret_kernels
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.operations import OPERATIONS
from pallas_kernels.quantized_matmul.api import MULTIPLY_MIXED

TOY = Operation(
    name="toy",
    implementations={"reference": lambda: 1, "xla": lambda: 2, "pallas_tpu": lambda: 3},
)


def test_none_picks_the_best_that_runs():
    assert TOY.choose() == Choice(
        implementation="xla", reason="the fastest one that runs on this platform"
    )
    assert TOY.function()() == 2


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_implementation_has_a_place_in_the_order_of_preference(name):
    assert set(backend.PREFERENCE) == set(typing.get_args(backend.Implementation))
    assert OPERATIONS[name].implementations.keys() <= set(backend.PREFERENCE)


def test_requested_implementation_runs():
    assert TOY.choose("reference") == Choice(implementation="reference", reason="asked for by name")
    assert TOY.function("reference")() == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cuda", "is not the name of an implementation"),
        ("pallas_gpu", "does not exist for toy"),
        ("pallas_tpu", "needs a tpu and this process has a cpu"),
    ],
)
def test_requested_implementation_that_cannot_run_is_refused(name, reason):
    with pytest.raises(ValueError) as error:
        # Call without type checks, as users do.
        inspect.unwrap(Operation.choose)(TOY, name)
    assert str(error.value) == (
        f"toy: implementation={name!r} {reason}. "
        "Choose one of 'xla', 'reference', or None for the best of them."
    )


def described_mesh(kind, name):
    device = AbstractDevice(kind, 1, name)
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


TPU = described_mesh("TPU v5 lite", "tpu")


def test_platform_is_that_of_the_mesh():
    """A program for described devices has their kernels."""
    assert platform() == "cpu"
    with jax.sharding.use_abstract_mesh(TPU):
        assert platform() == "tpu"
        assert TOY.choose().implementation == "pallas_tpu"
        assert TOY.choose("pallas_tpu").reason == "asked for by name"
    with jax.sharding.use_abstract_mesh(described_mesh("NVIDIA H100 80GB HBM3", "cuda")):
        assert platform() == "gpu"
        assert TOY.choose().implementation == "xla"
        with pytest.raises(ValueError, match="needs a tpu and the mesh is of gpu devices"):
            TOY.choose("pallas_tpu")
    with jax.set_mesh(jax.make_mesh((2,), ("x",))):
        assert TOY.choose().implementation == "xla"
    assert TOY.choose().implementation == "xla"


def test_a_jitted_function_is_traced_anew_for_another_platform():
    chosen = jax.jit(lambda x: x * TOY.function()())
    assert chosen(1) == 2
    with jax.sharding.use_abstract_mesh(TPU):
        assert "3" in str(chosen.trace(1).jaxpr)
    assert chosen(1) == 2


@pytest.mark.parametrize("interpreter", ["values", "machine"])
def test_interpreted_kernels_run_on_the_cpu(interpreter):
    def double(x):
        def kernel(x, y):
            y[...] = 2.0 * x[...]

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with interpret_kernels(interpreter):
        assert TOY.choose().implementation == "pallas_tpu"
        assert TOY.choose("xla").implementation == "xla"
        np.testing.assert_array_equal(jax.jit(double)(jnp.ones(8)), 2.0)
    assert TOY.choose().implementation == "xla"
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        jax.jit(double)(jnp.ones(8))


def test_every_operation_has_an_oracle():
    for name, operation in pallas_kernels.OPERATIONS.items():
        assert operation.name == name
        assert "reference" in operation.implementations
        assert getattr(pallas_kernels, name) is not None


def test_describing_starts_no_backend():
    """Choosing and result shapes need no device."""
    program = """
from functools import partial
import jax, jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh
from jax._src import xla_bridge
from pallas_kernels import (OPERATIONS, flash_attention, grouped_matmul)
x = jax.ShapeDtypeStruct((1, 300, 2, 8), jnp.float32)
jax.eval_shape(partial(flash_attention, implementation="reference"), x, x, x)
jax.eval_shape(
    partial(grouped_matmul, implementation="xla"),
    jax.ShapeDtypeStruct((9, 4), jnp.float32),
    jax.ShapeDtypeStruct((2, 4, 5), jnp.float32),
    jax.ShapeDtypeStruct((2,), jnp.int32),
)
tpu = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
with jax.sharding.use_abstract_mesh(tpu):
    assert OPERATIONS["flash_attention"].choose().implementation == "pallas_tpu"
    jax.eval_shape(flash_attention, x, x, x)
assert not xla_bridge._backends, xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=dict(os.environ), timeout=600)


@pytest.mark.parametrize("check_vma", [True, False])
def test_match_varying(check_vma):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    seen = []

    def body(a, b):
        zeros = jnp.zeros(3)
        seen.extend(
            jax.typeof(match_varying(zeros, *like)).mat.varying for like in ((), (a,), (a, b))
        )
        # A carry of zeros fits a body whose result varies.
        carry = match_varying(jnp.zeros(a.shape), a, b)
        return jax.lax.scan(lambda c, x: (c + a * x, None), carry, b)[0]

    run = jax.shard_map(
        body, mesh=mesh, in_specs=(P("x"), P("y")), out_specs=P(("x", "y")), check_vma=check_vma
    )
    jax.jit(run)(jnp.ones(4), jnp.ones(4))
    expected = [set(), {"x"}, {"x", "y"}] if check_vma else [set(), set(), set()]
    assert seen == expected


def test_match_varying_outside_is_the_identity():
    x = jnp.zeros(3)
    assert match_varying(x, jnp.ones(2)) is x
    assert match_varying(x) is x


H200 = described_mesh("NVIDIA H200", "cuda")


@pytest.mark.parametrize(
    ("kind", "chosen", "reason"),
    [
        ("NVIDIA H200", "pallas_gpu", "the fastest one that runs on this platform"),
        ("NVIDIA A100-SXM4-40GB", "pallas_gpu", "the fastest one that runs on this platform"),
        ("NVIDIA H100 80GB HBM3", "pallas_gpu", "25 to 41 times as fast as xla"),
        ("Tesla V100", "xla", "not pallas_gpu: the kernels need an NVIDIA GPU of compute"),
        ("AMD Instinct MI300X", "xla", "not pallas_gpu: the kernels need an NVIDIA GPU"),
    ],
)
def test_kernels_are_the_default_of_gpus_that_run_them(kind, chosen, reason):
    with jax.sharding.use_abstract_mesh(described_mesh(kind, "cuda")):
        choice = pallas_kernels.OPERATIONS["flash_attention"].choose()
        assert choice.implementation == chosen and reason in choice.reason
        # Without a kernel for GPUs.
        assert pallas_kernels.OPERATIONS["selective_scan"].choose().implementation == "xla"


def float64(*shape):
    return jax.ShapeDtypeStruct(shape, np.float64)


REFUSED = {
    "flash_attention": (float64(1, 8, 2, 16),) * 3,
    "grouped_matmul": (float64(8, 4), float64(2, 4, 5)),
    "grouped_outer": (float64(8, 4), float64(8, 5)),
    "grouped_swiglu": (float64(8, 4), float64(2, 4, 2, 5)),
    "paged_attention": (float64(4, 2, 16), float64(1, 3, 16, 2, 2, 16)),
    "quantized_matmul": (
        float64(8, 32),
        pallas_kernels.quantize(jnp.ones((32, 8)), "int8", axis=-2),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_gpu_kernel_takes_is_left_to_xla(name):
    """By default; by name it is refused, or said."""
    operation = pallas_kernels.OPERATIONS[name]
    with jax.sharding.use_abstract_mesh(H200):
        choice = operation.choose(None, *REFUSED[name])
        assert choice.implementation == "xla" and "float64" in choice.reason
        assert operation.choose("pallas_gpu", *REFUSED[name]).implementation == "pallas_gpu"
        assert operation.choose(None).implementation == "pallas_gpu"


def test_wrong_kernels_are_not_chosen(monkeypatch):
    monkeypatch.setattr(backend, "_WRONG", {})
    attention = pallas_kernels.OPERATIONS["flash_attention"]
    with jax.sharding.use_abstract_mesh(H200):
        backend.distrust("flash_attention", "pallas_gpu", "its gradient of q is off by 3.0")
        choice = attention.choose()
        assert choice.implementation == "xla"
        assert choice.reason.endswith("; not pallas_gpu: its gradient of q is off by 3.0")
        assert attention.choose("pallas_gpu").implementation == "pallas_gpu"
    with jax.sharding.use_abstract_mesh(described_mesh("NVIDIA A100-SXM4-40GB", "cuda")):
        assert attention.choose().implementation == "pallas_gpu"


def _deferred_in(value):
    """Yield the deferred functions of an implementation, of a partial function of one too."""
    if isinstance(value, DeferredProduct):
        yield value
    elif isinstance(value, functools.partial):
        for one in value.keywords.values():
            yield from _deferred_in(one)
    elif isinstance(value, tuple):
        for one in value:
            yield from _deferred_in(one)


@pytest.mark.parametrize("name", OPERATIONS)
def test_deferred_functions_are_there(name):
    operation = OPERATIONS[name]
    values = [*operation.implementations.values(), *operation.refusals.values()]
    if name == "quantized_matmul":
        values += MULTIPLY_MIXED.values()
    found = [one for value in values for one in _deferred_in(value)]
    assert all(callable(one.load()) for one in found)
    assert {one.address.split(".")[2].partition(":")[0] for one in found} <= {"tpu", "gpu", "cudnn"}


def test_a_command_reads_no_kernel_before_it_runs():
    program = (
        "import sys, experiments.pretrain;"
        " print([m for m in sys.modules if m == 'jax.experimental.pallas'"
        " or m.startswith('pallas_kernels.') and m.split('.')[-1] in ('tpu', 'gpu', 'cudnn')])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.stdout == "[]\n", answer.stderr
