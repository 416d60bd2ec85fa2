# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Capacity: what becomes of a router's choice where the load of an expert has a limit or a grain.

`CapacityBase` is what a layer asks of a member; `token_rounding.py` has the other one. This one,
`CapacityConfig`, limits the assignments of an expert within a row of the batch:

    C = ceil(factor * S * K / E)      per row of the batch (scope "sequence") and expert

With Z experts without computation besides the E that compute, and tau = `computing_share`:

    C = ceil(factor * tau * S * K / (tau * E + Z)),   C_free = ceil(factor * S * K / (tau * E + Z))

Assignments beyond C are dropped: the gate becomes 0, the slot empty, and the drop is counted. The
remaining gates are not renormalized. The scope is a row of the batch, so what is dropped depends
neither on the mesh nor on the number of micro-batches. Without a capacity (the default) nothing is
dropped.

S counts the positions of a row including padding, and K is `moe.top_k` even where a schedule uses
fewer. Evaluation drops as training does. With keep="gate" a later token can displace an earlier
one; causal models need keep="position". Generation with a cache routes one token at a time, which
never exceeds a capacity.

Sources: GShard (arXiv 2006.16668, section 2.2) for `position`; Megatron-LM's "probs" for `gate`;
MoE++ (arXiv 2410.07348, eq. 8) for the second form. The sum printed there has one assignment per
token; the reading chosen is K.

To add a member: a config that extends `CapacityBase`, its row under `capacity` in
`jaxmoe/catalog/layers.py`, its tests in `tests/jaxmoe/routing/`.
"""

from __future__ import annotations

import abc
import dataclasses
import fractions
import math
from typing import ClassVar, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.routing.base import Arrays, Key, RouterInputs, RouterOutput
from jaxmoe.routing.gates import GateBase
from sharding.assignments import Assignments

ADDED: Final = "added_assignments"
"""Statistic in `RouterStatistics.extra` []: assignments that are computed and that the router did
not choose."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CapacityTraits:
    """Properties of a capacity that the rest of the library depends on."""

    is_for_training: bool = False
    """Evaluation and decoding compute the router's choice as it is."""
    is_token_major: bool = True
    """Token t keeps its K slots, t*K to t*K+K-1."""
    needs_sequences: bool = True
    """Needs whole sequences on one device, in the order of their tokens."""
    has_zero_computation: bool = True
    """Counts experts without computation too."""
    row_slots: int = 0
    """Slots of added tokens of each expert, for each sequence on a device."""
    batch_slots: int = 0
    """Slots of added tokens of each expert, for the sequences of a device together."""


class RouterChoice(NamedTuple):
    """What a router has chosen, with its gates."""

    assignments: Assignments
    """The choice, token-major for most routers."""
    output: RouterOutput
    """Output of the router, whose selection these are."""
    inputs: RouterInputs
    gate: GateBase
    num_experts: int
    """Experts E that compute."""
    num_free: int = 0
    """Experts Z without computation, which have the last ids."""
    key: Key = None
    """Key of this layer and step; None where no random numbers are drawn."""


class CapacityBase(abc.ABC):
    """Base class of capacity configs; a capacity has no parameters, so the config is the
    capacity."""

    __slots__ = ()

    name: ClassVar[str]

    @property
    @abc.abstractmethod
    def traits(self) -> CapacityTraits:
        """Properties of the capacity."""

    @abc.abstractmethod
    def assign(self, choice: RouterChoice) -> tuple[Assignments, Arrays]:
        """Return the assignments that are computed.

        Args:
            choice: What the router has chosen.

        Returns:
            The assignments, with E + Z as the expert of an empty slot, and further additive
            statistics.
        """

    @abc.abstractmethod
    def check_length(self, length: int, *, top_k: int, num_experts: int) -> None:
        """Check, before anything is traced, that the loads of a sequence suit this capacity.

        Args:
            length: Tokens of one sequence.
            top_k: K.
            num_experts: E.

        Raises:
            ValueError: They do not.
        """

    @abc.abstractmethod
    def sized_for(self, *, rows_per_expert: float) -> CapacityBase:
        """Return the config with what depends on the loads adapted to them.

        Args:
            rows_per_expert: Mean assignments per expert and sequence.
        """

    @abc.abstractmethod
    def advice(self, *, top_k: int, num_experts: int, num_free: int, is_causal: bool) -> list[str]:
        """Return a line for each setting with an effect that is easily overlooked.

        Args:
            top_k: K.
            num_experts: Experts E that compute.
            num_free: Experts Z without computation.
            is_causal: Whether the lines are those of causal models alone: ways in which later
                tokens affect earlier ones in evaluation. False: those of any model.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CapacityConfig(CapacityBase):
    """Limits the assignments of an expert within one sequence; assignments beyond it are
    dropped."""

    name: ClassVar[str] = "capacity"

    factor: float = 1.25
    """Capacity over the even load; at E / top_k and above nothing is dropped."""
    keep: Literal["gate", "position"] = "gate"
    """Assignments that a full expert keeps: those of largest gate, or the first."""
    computing_share: float = 1.0
    """Target tau: load of an expert that computes over that of one that does not; only with
    zero_computation."""
    scope: Literal["sequence"] = "sequence"
    """Assignments that share one capacity: those of one row of the batch."""

    def __post_init__(self):
        if not 0.0 < self.factor < float("inf"):
            raise ValueError(f"capacity.factor={self.factor} must be finite and above 0")

        if not 0.0 < self.computing_share < float("inf"):
            raise ValueError(
                f"capacity.computing_share={self.computing_share} must be finite and above 0"
            )

    @property
    def traits(self) -> CapacityTraits:
        """In training and evaluation alike; the slots stay where they are."""
        return CapacityTraits()

    def assign(self, choice: RouterChoice) -> tuple[Assignments, Arrays]:
        """Empty the slots that exceed the capacity of their expert; see `limit`."""
        inputs = choice.inputs
        limited = limit(
            choice.assignments,
            self,
            sequence_length=inputs.extent.sequence_length or inputs.x.shape[0],
            num_experts=choice.num_experts,
            num_free=choice.num_free,
        )
        return limited, {}

    def check_length(self, length: int, *, top_k: int, num_experts: int) -> None:
        """Do nothing: sequences of any length have a limit."""
        del length, top_k, num_experts

    def sized_for(self, *, rows_per_expert: float) -> CapacityConfig:
        """Return the config: its limit is in proportion to the load."""
        del rows_per_expert
        return self

    def advice(self, *, top_k: int, num_experts: int, num_free: int, is_causal: bool) -> list[str]:
        """Return a line for a factor below 1, or for tokens that are kept by gate."""
        if not is_causal and self.factor < 1.0:
            return [
                f"moe.capacity.factor={self.factor} is below 1: even a perfectly even load cannot"
                " be held, and tokens are dropped at every step"
            ]
        drops = num_free > 0 or self.factor * top_k < num_experts
        if is_causal and self.keep == "gate" and drops:
            return [
                "moe.capacity.keep=gate in a causal model: of the tokens of a row an expert keeps"
                " those of largest gate, so a later token can displace an earlier one, and"
                " held-out losses depend on future tokens; set keep to position, or moe.capacity"
                " to None"
            ]
        return []

    def rows(self, sequence_length: int, top_k: int, num_experts: int, *, num_free: int = 0) -> int:
        """Return C, the capacity of an expert that computes, in one sequence."""
        share = self._share(sequence_length, top_k, num_experts, num_free)
        return math.ceil(share * _as_written(self.computing_share))

    def free_rows(self, sequence_length: int, top_k: int, num_experts: int, num_free: int) -> int:
        """Return the capacity of an expert without computation, in one sequence."""
        return math.ceil(self._share(sequence_length, top_k, num_experts, num_free))

    def _share(
        self, sequence_length: int, top_k: int, num_experts: int, num_free: int
    ) -> fractions.Fraction:
        experts = _as_written(self.computing_share) * num_experts + num_free
        return _as_written(self.factor) * sequence_length * top_k / experts


def _as_written(number: float) -> fractions.Fraction:
    """Return the exact decimal value: 1.1 in binary exceeds 1.1 and would be rounded up."""
    return fractions.Fraction(repr(number))


def limit(
    assignments: Assignments,
    config: CapacityConfig,
    *,
    sequence_length: int,
    num_experts: int,
    num_free: int = 0,
) -> Assignments:
    """Empty the slots that exceed the capacity of their expert in their sequence.

    Args:
        assignments: Token-major assignments of whole, consecutive sequences.
        config: Factor and policy.
        sequence_length: Tokens S of a sequence.
        num_experts: Experts E that compute.
        num_free: Experts Z without computation, which have the last ids.

    Raises:
        ValueError: the assignments are not token-major.
    """
    if assignments.top_k is None:
        raise ValueError("capacity needs token-major assignments: this router sets its own load")
    slots = sequence_length * assignments.top_k
    sizes = (sequence_length, assignments.top_k, num_experts)
    capacity = jnp.full((num_experts,), config.rows(*sizes, num_free=num_free), jnp.int32)
    if num_free:
        free = jnp.full((num_free,), config.free_rows(*sizes, num_free), jnp.int32)
        capacity = jnp.concatenate([capacity, free])
    shape = (assignments.expert_ids.size // max(slots, 1), slots)  # sequences, S*K
    ids = assignments.expert_ids.reshape(shape)
    if config.keep == "gate":
        order = -jax.lax.stop_gradient(assignments.gates).reshape(shape)
    else:
        order = jnp.zeros_like(assignments.gates).reshape(shape)
    is_kept = jax.vmap(lambda i, o: _first(i, o, capacity))(ids, order).reshape(-1)
    return dataclasses.replace(
        assignments,
        expert_ids=jnp.where(is_kept, assignments.expert_ids, num_experts + num_free),
        gates=jnp.where(is_kept, assignments.gates, 0.0),
    )


def _first(
    expert_ids: Int[Array, " A"], order: Float[Array, " A"], capacity: Int[Array, " E"]
) -> Bool[Array, " A"]:
    """Return whether each slot is within the capacity of its expert by `order`; ties by slot."""
    slots = jnp.arange(expert_ids.shape[0], dtype=jnp.int32)
    sorted_ids, _, by_expert = jax.lax.sort((expert_ids, order, slots), num_keys=2, is_stable=True)
    first_of_expert = jnp.searchsorted(sorted_ids, sorted_ids, side="left").astype(jnp.int32)
    rank = slots - first_of_expert
    is_kept = rank < capacity.at[sorted_ids].get(mode="fill", fill_value=0)
    return is_kept[jnp.argsort(by_expert)]
