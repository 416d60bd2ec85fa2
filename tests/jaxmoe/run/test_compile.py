# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Options of XLA for the train step: on a GPU alone, and never over those of the user."""

import types

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxmoe.run.compile import (
    GPU_OPTIONS,
    LARGE_TEMPORARIES,
    compile_with,
    compiler_options,
    one_at_a_time,
)

DEVICE = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
MESH = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=DEVICE)


def test_a_gpu_has_options_that_give_way_to_those_of_the_user():
    with jax.sharding.use_abstract_mesh(MESH):
        assert compiler_options({}) == GPU_OPTIONS
        assert compiler_options({"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"}) == {}


def test_others_have_none():
    assert compiler_options({}) == {}


def test_xla_knows_the_options():
    lowered = jax.jit(lambda x: x + 1.0).lower(1.0)
    assert lowered.compile(GPU_OPTIONS)(1.0) == 2.0


class LoweredProgram:
    """A program that XLA refuses with the options of GPUs."""

    def __init__(self, words):
        self.words = words

    def compile(self, options=None):
        if options is not None:
            raise jax.errors.JaxRuntimeError(self.words)
        return "compiled"


def test_a_step_that_the_options_do_not_allow_compiles_without_them():
    """Seen on an H100: a product of bfloat16 with float32."""
    lowered = LoweredProgram("INTERNAL: GEMM is not supported by cublasLt")
    with pytest.warns(
        UserWarning, match="without xla_gpu_enable_triton_gemm=False: INTERNAL: GEMM"
    ):
        assert compile_with(lowered, GPU_OPTIONS) == "compiled"


def test_a_lack_of_memory_is_not_tried_again():
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_with(LoweredProgram("RESOURCE_EXHAUSTED: out of memory"), GPU_OPTIONS)


class ProgramOfSize:
    """A program with temporaries, whose result notes that it was waited for."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes
        self.num_waits = 0

    def memory_analysis(self):
        return types.SimpleNamespace(temp_size_in_bytes=self.num_bytes)

    def __call__(self, state, batch):
        return self

    def block_until_ready(self):
        self.num_waits += 1
        return self


def test_a_cpu_computes_large_steps_one_at_a_time():
    """It holds the temporaries of all that were started: 6 GB in place of 3 for a state of 3."""
    small = ProgramOfSize(LARGE_TEMPORARIES - 1)
    assert one_at_a_time(small) is small
    large = ProgramOfSize(LARGE_TEMPORARIES)
    assert one_at_a_time(large)(None, None) is large and large.num_waits == 1
    with jax.sharding.use_abstract_mesh(MESH):
        assert one_at_a_time(large) is large, "a GPU uses the memory of one again"
