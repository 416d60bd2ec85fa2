# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `Observer`: what a step observes inside layers, routers and head; by default nothing.

    branch            output of a mixer or feed-forward, before it is added to the stream
    attention         log-sum-exp and largest logit of every query, if `reads_attention`
    router            additive statistics of the tokens of a device
    experts           values of every token of a device, of the axes that `expert_axes` names
    routing           a routed feed-forward with these values
    head              activations before the head
    parts             parts of a step that turn what was observed into metrics

Layers call the observer with their own arrays and return what it returns, `Observations`: sums over
real tokens with their numbers, and maxima. These are additive over devices and micro-batches,
joined over the halves of a layer by name and over layers by stacking. They have no gradient.

`ExecutionConfig.telemetry` names the member.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxmoe.catalog import choice
from jaxmoe.execution import ExecutionConfig
from jaxmoe.routing.base import Arrays, RouterInputs, RouterOutput, RouterStatistics
from sharding.assignments import Assignments
from sharding.constrain import Placement

if TYPE_CHECKING:
    from jaxmoe.layers.feed_forwards.moe.config import MoEConfig
    from jaxmoe.layers.records import RoutingInputs

LogicalAxes = tuple[str | None, ...]


# Not checked at run time: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@struct.dataclass
class Observations:
    """Sums over tokens and maxima, by name; stacked over layers they have a leading L."""

    sums: dict[str, Float[Array, "*L"]]
    counts: dict[str, Float[Array, "*L"]]
    """Tokens in each sum."""
    peaks: dict[str, Float[Array, "*L"]]
    """Maxima; -inf where there was no token."""

    def __add__(self, other: Observations) -> Observations:
        """Return the observations of two micro-batches together."""
        return Observations(
            sums=jax.tree.map(jnp.add, self.sums, other.sums),
            counts=jax.tree.map(jnp.add, self.counts, other.counts),
            peaks=jax.tree.map(jnp.maximum, self.peaks, other.peaks),
        )

    def __or__(self, other: Observations) -> Observations:
        """Return the observations of two parts of a layer, whose names differ."""
        return Observations(
            sums=self.sums | other.sums,
            counts=self.counts | other.counts,
            peaks=self.peaks | other.peaks,
        )


class RoutedCall(NamedTuple):
    """A routed feed-forward with its inputs and results."""

    x: Float[Array, "B S D"]
    """Normed input of the layer, in the compute dtype."""
    statistics: RouterStatistics
    """Routing statistics of the global batch."""
    values: dict[str, Array]
    """Values [B s ...] of every token, from `Observer.experts`."""
    weights: dict[str, Any]
    """Weights of the experts, as stored."""
    routing: RoutingInputs
    """Further inputs of the layer."""
    placement: Placement
    """Operations that place arrays."""


class ExpertCall(NamedTuple):
    """Experts of a layer with their tokens, on one device."""

    tokens: Float[Array, "T D"]
    """Activations."""
    logits: Float[Array, "T E"]
    """Router logits."""
    assignments: Assignments
    """Assignments to experts that compute."""
    dispatch: Callable[..., tuple[Array, Array]]
    """Dispatcher of the layer."""
    experts: Callable[..., Array]
    """Function of the experts."""
    weights: dict[str, Any]
    """Weights of the experts."""
    expert_tensor: tuple[str, ...]
    """Mesh axes over which the hidden units of an expert are cut, so that `experts` returns addends
    of its outputs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Observer(abc.ABC):
    """Base of the members; see the contract at the beginning of the file."""

    name: ClassVar[str]
    """Name in the catalogue."""
    reads_attention: ClassVar[bool]
    """Whether attention computes the size of its logits, in a second pass."""
    reads_weights: ClassVar[bool]
    """Whether it reads the weights of experts, which are then given as they are stored."""
    parts: ClassVar[tuple[Any, ...]]
    """Parts of a step (`jaxmoe.training.parts.base.StepPart`), after those that every step has."""

    @abc.abstractmethod
    def branch(
        self, name: str, output: Float[Array, "B S D"], token_mask: Bool[Array, "B S"]
    ) -> Observations | None:
        """Observe what a branch adds to the residual stream.

        Args:
            name: Name of the branch.
            output: Output before the residual multiplier.
            token_mask: False for padding.
        """

    @abc.abstractmethod
    def attention(
        self, logits: dict[str, Array], token_mask: Bool[Array, "B S"]
    ) -> Observations | None:
        """Observe the logits of attention.

        Args:
            logits: Log-sum-exp `lse` and largest logit `top` of every query [B N S]; empty unless
                `reads_attention`.
            token_mask: False for padding.
        """

    @abc.abstractmethod
    def router(self, output: RouterOutput, inputs: RouterInputs) -> Arrays:
        """Return additive statistics of the tokens of a device, for `RouterStatistics.extra`.

        Args:
            output: Output of the router, before capacity.
            inputs: Its inputs.
        """

    @abc.abstractmethod
    def expert_axes(self, moe: MoEConfig, axes: LogicalAxes) -> dict[str, LogicalAxes]:
        """Return the names of the values of `experts`, with their logical axes.

        Args:
            moe: Configuration of the layer.
            axes: Logical axes [B s] of the results of the layer.
        """

    @abc.abstractmethod
    def experts(self, moe: MoEConfig, call: ExpertCall) -> dict[str, Float[Array, "T ..."]]:
        """Observe the experts of every token of a device, on the device.

        Args:
            moe: Configuration of the layer.
            call: Experts with their tokens.
        """

    @abc.abstractmethod
    def routing(self, call: RoutedCall) -> Observations | None:
        """Observe a routed feed-forward.

        Args:
            call: Inputs and results of the layer.
        """

    @abc.abstractmethod
    def head(
        self, params: Any, hidden: Float[Array, "B S D"], batch: Any, step: Any
    ) -> Observations | None:
        """Observe the output logits, with a leading dimension of 1 in place of L.

        Args:
            params: Parameters of the model.
            hidden: Activations after the final norm.
            batch: Rows; tokens with weight 0 are left out.
            step: Step with model and execution (`jaxmoe.training.step.Step`).
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BriefObserver(Observer):
    """Observes nothing beside the load of the routers."""

    name: ClassVar[str] = "brief"
    reads_attention: ClassVar[bool] = False
    reads_weights: ClassVar[bool] = False
    parts: ClassVar[tuple[Any, ...]] = ()

    def branch(self, name: str, output: Array, token_mask: Array) -> None:
        """Observe nothing."""

    def attention(self, logits: dict[str, Array], token_mask: Array) -> None:
        """Observe nothing."""

    def router(self, output: RouterOutput, inputs: RouterInputs) -> Arrays:
        """Return no further statistics."""
        return {}

    def expert_axes(self, moe: MoEConfig, axes: LogicalAxes) -> dict[str, LogicalAxes]:
        """Return no names."""
        return {}

    def experts(self, moe: MoEConfig, call: ExpertCall) -> dict[str, Array]:
        """Return no values."""
        return {}

    def routing(self, call: RoutedCall) -> None:
        """Observe nothing."""

    def head(self, params: Any, hidden: Array, batch: Any, step: Any) -> None:
        """Observe nothing."""


def observer_of(execution: ExecutionConfig) -> Observer:
    """Return the observer that an execution asks for.

    Args:
        execution: Extent of the measurements.
    """
    return _observer(execution.telemetry)


@functools.cache
def _observer(name: str) -> Observer:
    return choice("observer", name)()


def unite(*parts: Observations | None) -> Observations | None:
    """Return the observations of several parts of a layer; None where there are none."""
    present = [part for part in parts if part is not None]
    return functools.reduce(lambda one, other: one | other, present) if present else None


def interleave(parts: Sequence[Observations], repeats: int) -> Observations:
    """Join the observations of a period's layers in the order of the layers.

    Args:
        parts: Observations of each layer of the period, stacked over the repeats.
        repeats: Number of repeats.
    """
    if len(parts) == 1:
        return parts[0]
    return _join(parts, [repeats] * len(parts), lambda rows: jnp.stack(rows, 1).reshape(-1))


def join_stacks(parts: Sequence[tuple[Observations, int]]) -> Observations:
    """Return the observations of all layers from those of consecutive scans.

    Args:
        parts: Observations of each scan and its number of layers. A layer without an observation
            has a count of 0, or a peak of -inf.
    """
    stacks, layers = zip(*parts, strict=True)
    return _join(stacks, layers, jnp.concatenate)


def _join(
    parts: Sequence[Observations],
    layers: Sequence[int],
    join: Callable[[list[Array]], Array],
) -> Observations:
    """Return the observations of several scans, each of so many layers, joined by name."""

    def join_arrays(kind: str, fill: float) -> dict[str, Array]:
        names = dict.fromkeys(name for part in parts for name in getattr(part, kind))
        absent = [jnp.full((number,), fill, jnp.float32) for number in layers]
        return {
            name: join(
                [getattr(p, kind).get(name, none) for p, none in zip(parts, absent, strict=True)]
            )
            for name in names
        }

    return Observations(
        sums=join_arrays("sums", 0.0),
        counts=join_arrays("counts", 0.0),
        peaks=join_arrays("peaks", -jnp.inf),
    )
