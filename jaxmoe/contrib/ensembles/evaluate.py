# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares an ensemble, routed by the partition of the data, with its members.

The temperature of the router is chosen on the last quarter of the held-out batches, which is then
not scored, or given.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxmoe.contrib.ensembles.members import EnsembleMembers
from jaxmoe.contrib.ensembles.mixture import (
    ensemble_nll,
    member_log_weights,
    part_distances,
    part_log_probs,
)

TEMPERATURES = tuple(2.0 ** (power / 2) for power in range(-20, 7))
"""Temperatures that are tried, from 2^-10 to 2^3."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PositionBin:
    """Losses of the tokens at some positions of their documents, bits per token."""

    first: int
    last: int
    member: float
    """Best member."""
    uniform: float
    routed: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EnsembleResult:
    """Held-out losses of members and mixtures on the same tokens, bits per token."""

    num_tokens: int
    """Tokens that are scored."""
    num_scored: int
    """Batches that are scored."""
    num_calibration: int
    """Batches that chose the temperature; 0 if it was given."""
    temperature: float
    member_bits: tuple[float, ...]
    member_weights: tuple[float, ...]
    """Mean weight of each member in the routed mixture."""
    uniform_bits: float
    """Mean of the members' probabilities."""
    routed_bits: float
    """Probabilities of the members weighted by the router."""
    positions: tuple[PositionBin, ...]


def evaluate_ensemble(
    members: EnsembleMembers, *, top: int = 2, temperature: float | None = None
) -> EnsembleResult:
    """Return the losses of an ensemble and of its members.

    Args:
        members: Losses of the members.
        top: Members that are used per token.
        temperature: Temperature of the router; chosen on held-out batches that are not scored when
            None.

    Raises:
        ValueError: `top` or `temperature` is out of range, or there is one batch alone and no
            temperature.
    """
    check_router(top, temperature)
    number = len(members.batches)
    if temperature is None and number < 2:
        raise ValueError(
            "the temperature is chosen on held-out batches that are not scored, and there is one"
            " batch: give --temperature, or --batches 2 or more"
        )
    num_calibration = 0 if temperature is not None else max(1, number // 4)
    nll = np.stack([member.nll for member in members.members], axis=-1)  # [batches B S R]
    weights = np.stack([np.asarray(batch.loss_weights, np.float64) for batch in members.batches])
    batch_distances = [
        part_distances(batch, members.clusters.centroids) for batch in members.batches
    ]
    distances, is_empty = (np.stack(arrays) for arrays in zip(*batch_distances, strict=True))

    def log_weights(part: slice, value: float) -> np.ndarray:
        log_probs = part_log_probs(distances[part], is_empty[part], value)
        return member_log_weights(log_probs, members.parts, top)

    scored = slice(0, number - num_calibration)
    spare = slice(number - num_calibration, number)

    def spare_bits(value: float) -> float:
        return _bits(ensemble_nll(nll[spare], log_weights(spare, value)), weights[spare])

    chosen = min(TEMPERATURES, key=spare_bits) if temperature is None else temperature
    losses = nll[scored]
    counted = weights[scored]
    routing = log_weights(scored, chosen)
    routed = ensemble_nll(losses, routing)
    uniform = ensemble_nll(losses, np.full_like(losses, -math.log(losses.shape[-1])))
    alone = np.moveaxis(losses, -1, 0)
    shares = np.moveaxis(np.exp(routing), -1, 0)
    member_bits = tuple(_bits(each, counted) for each in alone)
    return EnsembleResult(
        num_tokens=round(float(counted.sum())),
        num_scored=number - num_calibration,
        num_calibration=num_calibration,
        temperature=chosen,
        member_bits=member_bits,
        member_weights=tuple(float((w * counted).sum() / counted.sum()) for w in shares),
        uniform_bits=_bits(uniform, counted),
        routed_bits=_bits(routed, counted),
        positions=_by_position(
            _positions(members)[scored],
            counted,
            (alone[int(np.argmin(member_bits))], uniform, routed),
        ),
    )


def check_router(top: int, temperature: float | None) -> None:
    """Raise a ValueError for a router that cannot be built."""
    if top < 1:
        raise ValueError(f"top={top} must be at least 1: the members that are used per token")
    if temperature is not None and not (math.isfinite(temperature) and temperature > 0.0):
        raise ValueError(f"temperature={temperature} must be a number above 0")


def _bits(nll: np.ndarray, weights: np.ndarray) -> float:
    """Return the mean loss in bits per token."""
    return float((nll * weights).sum() / weights.sum() / math.log(2.0))


def _positions(members: EnsembleMembers) -> np.ndarray:
    """Return the position of each token in its document [batches B S]."""
    places = []
    for batch in members.batches:
        positions = np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)
        places.append(positions if batch.positions is None else np.asarray(batch.positions))
    return np.stack(places)


def _by_position(
    places: np.ndarray, weights: np.ndarray, losses: Sequence[np.ndarray]
) -> tuple[PositionBin, ...]:
    """Return the losses of best member, uniform and routed mixture in bins that double."""
    bins = []
    first = 0
    while first <= int(places.max()):
        last = 2 * first
        part_weights = np.where((places >= first) & (places <= last), weights, 0.0)
        if part_weights.sum() > 0.0:
            member, uniform, routed = (_bits(loss, part_weights) for loss in losses)
            bins.append(
                PositionBin(
                    first=first,
                    last=min(last, int(places.max())),
                    member=member,
                    uniform=uniform,
                    routed=routed,
                )
            )
        first = last + 1
    return tuple(bins)
