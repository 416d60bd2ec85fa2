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
falls back in silence. The device platform is asked for only where the answer depends on it, so
that planning for devices that are not there, and describing a model, start no backend.

To add an implementation to an operation, add its function to the table in the operation's api.py.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]

PREFERENCE: tuple[Implementation, ...] = ("pallas_tpu", "pallas_gpu", "xla", "reference")

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
        """The implementations that run on this process's devices, best first."""
        return [name for name in PREFERENCE if name in self.implementations and _runs_here(name)]

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
            best = self.runnable()[0]
            return Choice(implementation=best, reason="the fastest one that runs on this platform")
        if requested in self.implementations and _runs_here(requested):
            return Choice(implementation=requested, reason="asked for by name")
        if requested not in typing.get_args(Implementation):
            rule = "is not the name of an implementation"
        elif requested not in self.implementations:
            rule = f"does not exist for {self.name}"
        else:
            rule = f"needs a {PLATFORMS[requested]} and this process has a {jax.default_backend()}"
        raise ValueError(
            f"{self.name}: implementation={requested!r} {rule}. "
            f"Choose one of {', '.join(map(repr, self.runnable()))}, or None for the best of them."
        )

    def function(self, requested: Implementation | None = None) -> Callable[..., Any]:
        """The function behind `choose(requested)`."""
        return self.implementations[self.choose(requested).implementation]


def _runs_here(name: Implementation) -> bool:
    return name not in PLATFORMS or jax.default_backend() == PLATFORMS[name]
