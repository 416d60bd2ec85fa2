# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operation runs, and why.

Every operation of this package has a slow oracle, `reference`, and one or more fast
implementations of the same signature:

    reference    the definition, in a few lines of plain jax.numpy; runs everywhere
    xla          fast without a kernel of our own; runs everywhere, tuned on the CPU
    pallas_tpu   Pallas kernels for TPUs
    pallas_gpu   Pallas kernels for GPUs

A name given by the caller either runs or is refused at once with the reason. None picks the first
of `PREFERENCE` that exists and runs here, and `Operation.choose` says which one that is; nothing
falls back in silence.

"Here" is the platform that a program is traced for: that of the devices of the mesh in context,
which need not be there (a topology's, so that a plan for TPUs has the kernels that a run on TPUs
has), or without one, this process's. It is asked for only where the answer depends on it, so that
planning, and describing a model, start no backend. TPU kernels also run inside `interpreted()`.

To add an implementation to an operation, add its function to the table in the operation's api.py.
"""

import contextlib
import contextvars
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
from jax.experimental.pallas import tpu as pltpu

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]

PREFERENCE: tuple[Implementation, ...] = ("pallas_tpu", "xla", "pallas_gpu", "reference")
"""The kernels for GPUs are interpreted and compiled in the tests and have never run on a GPU, where
the interpreters do not show all that can go wrong: until they have, they are for who asks by name.
"""

# Implementations that are not named here run on every platform.
PLATFORMS: dict[Implementation, str] = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An implementation and the reason why it was picked."""

    implementation: Implementation
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation and the table of its implementations."""

    name: str
    implementations: Mapping[Implementation, Callable[..., Any]]

    def runnable(self) -> list[Implementation]:
        """The implementations that run here, best first."""
        return [name for name in self._ordered() if _runs_here(name)]

    def _ordered(self) -> list[Implementation]:
        return [name for name in PREFERENCE if name in self.implementations]

    def choose(self, requested: Implementation | None = None) -> Choice:
        """The implementation that a call with `implementation=requested` runs, and why.

        Args:
            requested: A name, or None for the best that runs here.

        Returns:
            The choice.

        Raises:
            ValueError: `requested` is no implementation of this operation, or cannot run here.
        """
        if requested is None:
            # The platform is not asked for where a better one runs everywhere.
            best: Implementation = next(name for name in self._ordered() if _runs_here(name))
            return Choice(implementation=best, reason="the fastest one that runs on this platform")
        if requested in self.implementations and _runs_here(requested):
            return Choice(implementation=requested, reason="asked for by name")
        if requested not in typing.get_args(Implementation):
            rule = "is not the name of an implementation"
        elif requested not in self.implementations:
            rule = f"does not exist for {self.name}"
        else:
            rule = f"needs a {PLATFORMS[requested]} and {_words()}"
        raise ValueError(
            f"{self.name}: implementation={requested!r} {rule}. "
            f"Choose one of {', '.join(map(repr, self.runnable()))}, or None for the best of them."
        )

    def function(self, requested: Implementation | None = None) -> Callable[..., Any]:
        """The function behind `choose(requested)`."""
        return self.implementations[self.choose(requested).implementation]


def platform() -> str:
    """The platform that a program traced here is for: "cpu", "gpu" or "tpu".

    Inside a jitted function it is the mesh in context at its first call that counts, and JAX traces
    anew when another mesh is set.
    """
    device = _described_device()
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def device_kind() -> str:
    """What the device is called that a program traced here is for: "TPU v5 lite", "NVIDIA H200"."""
    device = _described_device()
    return jax.devices()[0].device_kind if device is None else device.device_kind


Interpreter = Literal["values", "machine"]

_INTERPRETER: contextvars.ContextVar[Interpreter | None] = contextvars.ContextVar(
    "interpreter", default=None
)


@contextlib.contextmanager
def interpreted(interpreter: Interpreter = "machine") -> Iterator[None]:
    """Lets TPU kernels run on the CPU, to test them: inside, "pallas_tpu" runs and None picks it.

    Args:
        interpreter: "machine" follows a TPU's memories, copies and semaphores; "values" runs the
            body of a kernel as any other program, faster, outside manual regions alone.
    """
    # What `pallas_call` would be given as `interpret`: True is its plain interpreter.
    params = pltpu.InterpretParams() if interpreter == "machine" else typing.cast(Any, True)
    token = _INTERPRETER.set(interpreter)
    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield
    finally:
        _INTERPRETER.reset(token)


def _runs_here(name: Implementation) -> bool:
    if name == "pallas_tpu" and _INTERPRETER.get() is not None:
        return True
    return name not in PLATFORMS or platform() == PLATFORMS[name]


def _described_device() -> Any:
    return jax.sharding.get_abstract_mesh().abstract_device


def _words() -> str:
    if _described_device() is None:
        return f"this process has a {jax.default_backend()}"
    return f"the mesh is of {platform()} devices"
