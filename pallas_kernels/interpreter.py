# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs TPU kernels on the CPU, for tests."""

import contextlib
import typing
from collections.abc import Iterator
from typing import Any, Literal

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backend import tpu_kernels_run

Interpreter = Literal["values", "machine"]


@contextlib.contextmanager
def interpret_kernels(interpreter: Interpreter = "machine") -> Iterator[None]:
    """Run TPU kernels on the CPU: inside, "pallas_tpu" runs and None picks it.

    Args:
        interpreter: "machine" models a TPU's memories, copies and semaphores; "values" runs the
            body of a kernel like any other program, which is faster, outside manual regions only.
    """
    # True is the plain interpreter of `pallas_call`.
    params = pltpu.InterpretParams() if interpreter == "machine" else typing.cast(Any, True)
    with tpu_kernels_run(), pltpu.force_tpu_interpret_mode(params):
        yield
