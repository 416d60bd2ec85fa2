# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""SwitchLoRA: columns of the factors are swapped with candidates all the time (arXiv 2406.06564).

    x W + s sum_k (x a_k) b_k        a_k [in] of A, b_k [out] of B
    swap a_k and a candidate c       W = W + s (a_k - c) b_k,  a_k = c,  and the old a_k waits
    swap b_k                         likewise

so that the product with the input stays the same and sums of many ranks are learned. Each vector is
swapped in a step with probability rate * 0.3^(t / (steps / 10)). The moments of the counterpart
(b_k for a_k) are set to 0, and it is not trained for `pause` steps. Candidates are drawn with
deviations ((sqrt(out) r) / in^1.5)^(1/4) for A and (r / sqrt(in out))^(1/4) for B.

The adapted matrices move: checkpoints hold all parameters. B starts at zero here, so that training
begins at the adapted model; the method was made for pre-training, where it starts as candidates do.
The original has min(in, out) candidates on each side.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxmoe.adapters.base import STATE, State, StepGiven
from jaxmoe.adapters.factors import (
    TRAINED,
    MatrixFactorsConfig,
    batch_of,
    by_path,
    factor_rows,
    nest,
)
from jaxmoe.contrib.adapters.moments import without_moments
from jaxmoe.declarations import fold_path
from jaxmoe.field_docs import with_field_docs
from jaxmoe.parameters import ParameterSpec, ParameterTable
from sharding.constrain import lie_at, surroundings
from sharding.rules import LogicalAxisRules

_FALL = 0.3
_SPAN = 0.1
_NAMES = ("down", "up")


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SwitchLoraConfig(MatrixFactorsConfig):
    """Low-rank additions whose vectors are swapped all the time; the adapted matrices move."""

    name: ClassVar[str] = "switch_lora"
    has_after_step: ClassVar[bool] = True
    moves_base: ClassVar[bool] = True

    alpha: float = 16.0
    """The addition is multiplied with alpha / rank."""
    candidates: int = 64
    """Vectors that wait to be swapped in, for each factor; at least rank."""
    rate: float = 1 / 40
    """Probability of a swap of a vector in the first step."""
    steps: int = 200
    """Steps of the training (training.steps); the rate falls to 0.3 of its value in a tenth."""
    pause: int = 5
    """Steps for which the counterpart of a vector that was swapped is not trained."""

    def __post_init__(self):
        MatrixFactorsConfig.__post_init__(self)
        if (number := self.candidates) < (least := max(self.rank, self.expert_rank or 1)):
            raise ValueError(f"adapter.candidates={number} must be at least the rank, {least}")
        if not 0 <= self.rate <= 1:
            raise ValueError(f"adapter.rate={self.rate} must lie between 0 and 1")
        for field, least in (("steps", 1), ("pause", 0)):
            if (steps := getattr(self, field)) < least:
                raise ValueError(f"adapter.{field}={steps} must be at least {least}")

    def note_on(self, steps: int) -> str | None:
        """Say where swaps become rare as in a run of other steps; see the base class."""
        note = f"adapter.steps={self.steps} makes swaps rare, the run has {steps} steps: set both"
        return None if self.steps == steps else note

    def rows_of(
        self, row: ParameterSpec, is_adapted: tuple[bool, ...], rules: LogicalAxisRules
    ) -> list[ParameterSpec]:
        """Return the rows of the factors of a matrix; see `MatrixFactorsConfig.rows_of`."""
        rank = self.rank_of(row)
        scale = self.alpha / rank
        scales = tuple(scale if has_adapter else 0.0 for has_adapter in is_adapted)
        hyper = dataclasses.replace(TRAINED, init_std=_deviations(row, rank)[0], fan_in_power=0.0)
        return factor_rows(row, rank, scales, rules, hyper=hyper)

    def first_state(self, params: Any, table: ParameterTable, key: Array) -> Any:
        """Return the candidates [*G c n], and no pauses [*G r]; see `Adapter.first_state`."""
        flat = by_path(params)
        state = {}
        for row in [row for row in table if f"{row.path}:down" in flat]:
            rank = flat[f"{row.path}:down"].shape[-1]
            for name, side, deviation in zip(_NAMES, (0, 1), _deviations(row, rank), strict=True):
                path = f"{row.path}:{name}"
                batch = batch_of(row)
                shape = (*batch, self.candidates, row.declaration.fan(side))
                drawn = jax.random.normal(fold_path(key, path), shape, jnp.float32)
                state[f"{path}/waiting"] = deviation * drawn
                state[f"{path}/paused"] = jnp.zeros((*batch, rank), jnp.int32)
        return nest(state)

    def after_step(self, state: State, grads: Any, step_inputs: StepGiven) -> State:
        """Return the state with paused vectors as before, and some swapped."""
        del grads
        now: Any = state
        params, before, rule_state = (
            by_path(tree) for tree in (now.params, step_inputs.before.params, self.own_state(now))
        )
        key = jax.random.fold_in(now.rng, now.step)
        stopped = {}
        chance = self.rate * _FALL ** (now.step.astype(jnp.float32) / (_SPAN * self.steps))
        for path in [path.removesuffix(":down") for path in params if path.endswith(":down")]:
            names = [f"{path}:{name}" for name in _NAMES]
            mine = [f"{name}/{part}" for part in ("waiting", "paused") for name in names]
            changed = [
                params[path],
                *(params[name] for name in names),
                *(rule_state[name] for name in mine),
            ]
            olds = [*(before[name] for name in names), params[f"{path}:scale"]]
            run = self._follow
            if surroundings() == "explicit":
                specs = [jax.typeof(leaf).sharding.spec for leaf in changed]
                axes = jax.sharding.get_abstract_mesh().axis_names
                run = lie_at(run, axes=axes, specs=(specs, [PartitionSpec()] * 2))
            (params[path], *news), masks = run(changed, olds, chance, fold_path(key, path))
            params |= dict(zip(names, news[:2], strict=True))
            rule_state |= dict(zip(mine, news[2:], strict=True))
            stopped |= dict(zip(names, masks, strict=True))
        moments = without_moments(now.opt_state, params, stopped)
        parts = {**now.parts, STATE: nest(rule_state)}
        return dataclasses.replace(now, params=nest(params), parts=parts, opt_state=moments)

    def _follow(
        self, changed: list[Array], olds: list[Array], chance: Array, key: Array
    ) -> tuple[list[Array], list[Array]]:
        """Return the arrays of one matrix after a step, and which moments of A and B are 0.

        Args:
            changed: W, A, B, candidates of both and pauses of both, after the update.
            olds: A and B before it, and s.
            chance: Probability of a swap.
            key: PRNG key.
        """
        weight, *factors = changed[:3]
        pools = changed[3:5]
        pauses = changed[5:]
        scale = olds[2]
        stopped = [pause > 0 for pause in pauses]
        lead = pauses[0].shape
        keys = jax.random.split(key)
        vectors = [
            jnp.where(stopped[i][..., None], _rows(olds[i], i, lead), _rows(factors[i], i, lead))
            for i in (0, 1)
        ]
        pauses = [jnp.maximum(pause - 1, 0) for pause in pauses]
        added = jnp.zeros((*lead[:-1], vectors[0].shape[-1], vectors[1].shape[-1]), jnp.float32)
        for side in (0, 1):
            new, pools[side], is_in = _swap(keys[side], vectors[side], pools[side], chance)
            pair = [*vectors]
            pair[side] = vectors[side] - new
            added += jnp.einsum("...ri,...ro->...io", *pair, precision="highest")
            vectors[side] = new
            pauses[1 - side] = jnp.where(is_in, self.pause, pauses[1 - side])
            stopped[1 - side] |= is_in
        wide = scale.reshape(scale.shape + (1,) * (weight.ndim - scale.ndim))
        weight += wide * added.reshape(weight.shape)
        down = jnp.swapaxes(vectors[0], -1, -2).reshape(factors[0].shape)
        up = vectors[1].reshape(factors[1].shape)
        stopped[0] = stopped[0].reshape(*lead[:-1], *(1,) * (down.ndim - len(lead)), lead[-1])
        stopped[1] = stopped[1].reshape(*lead, *(1,) * (up.ndim - len(lead)))
        return [weight, down, up, *pools, *pauses], stopped


def _swap(key: Array, vectors: Array, waiting: Array, chance: Array) -> tuple[Array, ...]:
    """Return vectors [*G r n] and candidates [*G c n] with some swapped, and which [*G r]."""
    keys = jax.random.split(key)
    rank = vectors.shape[-2]
    number = waiting.shape[-2]
    places = jnp.argsort(jax.random.uniform(keys[0], waiting.shape[:-1]), axis=-1)[..., :rank]
    is_in = jax.random.uniform(keys[1], vectors.shape[:-1]) < chance
    # Row i is true at the candidate that takes the place of vector i.
    pairs = jax.nn.one_hot(places, number, dtype=bool) & is_in[..., None]
    product = functools.partial(jnp.einsum, precision="highest")
    incoming = product("...rc,...cn->...rn", pairs.astype(jnp.float32), waiting)
    outgoing = product("...rc,...rn->...cn", pairs.astype(jnp.float32), vectors)
    new = jnp.where(is_in[..., None], incoming, vectors)
    return new, jnp.where(jnp.any(pairs, axis=-2)[..., None], outgoing, waiting), is_in


def _rows(factor: Array, side: int, lead: tuple[int, ...]) -> Array:
    """Return the vectors of A [*G *I r], side 0, or B [*G r *O] as rows [*G r n]."""
    turned = jnp.swapaxes(factor.reshape(*lead[:-1], -1, lead[-1]), -1, -2)
    return factor.reshape(*lead, -1) if side else turned


def _deviations(row: ParameterSpec, rank: int) -> tuple[float, float]:
    """Return the deviations of the candidates for A and for B."""
    inputs, outputs = (row.declaration.fan(side) for side in (0, 1))
    first = (math.sqrt(outputs) * rank / inputs**1.5) ** 0.25
    return first, (rank / math.sqrt(inputs * outputs)) ** 0.25
