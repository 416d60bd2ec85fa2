# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the implementation of an operation, and gives the reason.

Every operation of this package has a slow reference and one or more fast implementations of the
same signature:

    reference    the definition, in a few lines of plain jax.numpy; runs everywhere
    xla          fast without a kernel; runs everywhere, tuned on the CPU
    pallas_tpu   Pallas kernels for TPUs
    pallas_gpu   Pallas kernels for GPUs
    cudnn        NVIDIA's cuDNN, through XLA

A requested implementation runs or raises. None picks the first of `PREFERENCE` that exists, runs
here, takes the arguments and has not been found wrong on this device (`distrust`);
`Operation.choose` names it and says why.

"Here" is the platform that a program is traced for: that of the devices of the mesh in context,
which may be only described (so that a plan for TPUs has the kernels of a run on TPUs), or without a
mesh that of this process. The platform is queried only where the answer depends on it, so that
planning, and describing a model, start no backend. TPU kernels also run inside
`pallas_kernels.interpreter.interpret_kernels`.
"""

import contextlib
import contextvars
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax

from pallas_kernels import measured

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu", "cudnn"]

PREFERENCE: tuple[Implementation, ...] = ("pallas_tpu", "cudnn", "pallas_gpu", "xla", "reference")
"""Implementations from best to worst, where `pallas_kernels.measured` has no row."""

# Implementations without an entry run on every platform.
PLATFORMS: dict[Implementation, str] = {"pallas_tpu": "tpu", "cudnn": "gpu", "pallas_gpu": "gpu"}

_FASTEST = "the fastest one that runs on this platform"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An implementation and the reason for it."""

    implementation: Implementation
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation and its implementations."""

    name: str
    implementations: Mapping[Implementation, Callable[..., Any]]
    refusals: Mapping[Implementation, Callable[..., str | None]] = dataclasses.field(
        default_factory=dict
    )
    """Functions that return why None does not choose an implementation on this device, for these
    first arguments where there are any, or None; those without an entry take all."""

    def runnable(self) -> list[Implementation]:
        """Return the implementations that run here, best first."""
        return [name for name in self._order() if _runs_here(name)]

    def _order(self) -> list[Implementation]:
        return [name for name in PREFERENCE if name in self.implementations]

    def choose(self, requested: Implementation | None = None, *arguments: Any) -> Choice:
        """Return the implementation that runs for `implementation=requested`, and why.

        Args:
            requested: Name of an implementation, or None for the best that runs here.
            *arguments: First arguments of the operation, for None: shapes and dtypes count. Without
                them the choice is that for arguments which every implementation takes.

        Returns:
            The choice.

        Raises:
            ValueError: `requested` is no implementation of this operation, or cannot run here.
        """
        if requested is None:
            return self._note(self._best(arguments))
        if requested in self.implementations and _runs_here(requested):
            return self._note(Choice(implementation=requested, reason="asked for by name"))
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

    def function(
        self, requested: Implementation | None = None, *arguments: Any
    ) -> Callable[..., Any]:
        """Return the function of `choose(requested, *arguments)`."""
        return self.implementations[self.choose(requested, *arguments).implementation]

    def depends_on_arguments(self) -> bool:
        """Return whether None may choose another implementation here for other arguments."""
        return any(_runs_here(name) for name in self.refusals)

    def _note(self, choice: Choice) -> Choice:
        """Return a choice, which is written down inside of `choices`."""
        if (record := _CHOICES.get()) is not None:
            record.setdefault(self.name, {})[choice.implementation] = choice
        return choice

    def _best(self, arguments: tuple[Any, ...]) -> Choice:
        against: list[str] = []
        for name in self._order():
            if not _runs_here(name):
                continue
            if (reason := self._against(name, arguments)) is None:
                description = measured.words(self.name, name, device_kind) or _FASTEST
                return Choice(implementation=name, reason="; ".join([description, *against]))
            against.append(f"not {name}: {reason}")
        raise ValueError(f"{self.name}: no implementation runs here: {'; '.join(against)}")

    def _against(self, name: Implementation, arguments: tuple[Any, ...]) -> str | None:
        """Return why None does not choose an implementation that runs here; None if it may."""
        if _WRONG and (reason := _WRONG.get((self.name, name, device_kind()))) is not None:
            return reason
        refusal = self.refusals.get(name)
        return None if refusal is None else refusal(*arguments)


Choices = dict[str, dict[Implementation, Choice]]
"""Choices by operation and implementation, in the order of their first calls."""

_CHOICES: contextvars.ContextVar[Choices | None] = contextvars.ContextVar("choices", default=None)


@contextlib.contextmanager
def choices() -> Iterator[Choices]:
    """Write down what is chosen inside, such as by the operations of a program that is traced.

    Yields:
        The choices so far.
    """
    record: Choices = {}
    token = _CHOICES.set(record)
    try:
        yield record
    finally:
        _CHOICES.reset(token)


_WRONG: dict[tuple[str, Implementation, str], str] = {}


def distrust(operation: str, implementation: Implementation, reason: str) -> None:
    """Keep None from choosing an implementation on this kind of device, in this process.

    Args:
        operation: Name of the operation.
        implementation: Name of the implementation.
        reason: What was wrong, for `Choice.reason`.
    """
    _WRONG[operation, implementation, device_kind()] = reason


def platform() -> str:
    """Return the platform that a program traced here is for: "cpu", "gpu" or "tpu".

    Inside a jitted function the mesh in context at its first call counts; JAX retraces when another
    mesh is set.
    """
    device = _described_device()
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def device_kind() -> str:
    """Return the device kind that a program is traced for: "TPU v5 lite", "NVIDIA H200"."""
    device = _described_device()
    return jax.devices()[0].device_kind if device is None else device.device_kind


_IS_INTERPRETED: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "is_interpreted", default=False
)


@contextlib.contextmanager
def tpu_kernels_run() -> Iterator[None]:
    """Let "pallas_tpu" run inside on any platform, where None picks it; see `interpret_kernels`."""
    token = _IS_INTERPRETED.set(True)
    try:
        yield
    finally:
        _IS_INTERPRETED.reset(token)


def _runs_here(name: Implementation) -> bool:
    if name == "pallas_tpu" and _IS_INTERPRETED.get():
        return True
    return name not in PLATFORMS or platform() == PLATFORMS[name]


def _described_device() -> Any:
    return jax.sharding.get_abstract_mesh().abstract_device


def _words() -> str:
    if _described_device() is None:
        return f"this process has a {jax.default_backend()}"
    return f"the mesh is of {platform()} devices"
