# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""AdaLoRA: low-rank additions whose ranks shrink where they matter least (arXiv 2303.10512).

    y = x W + s (x A) diag(e) B        A, B normal with deviation 0.02, e zeros, s = alpha / r

A triplet is a column of A, its e, and its row of B. After each step, from parameters w and
gradients g,

    sensitivity  I = beta_1 I + (1 - beta_1) |w g|
    uncertainty  U = beta_2 U + (1 - beta_2) ||w g| - I|
    score of a triplet = I U of e + mean of I U over the column of A + the same of the row of B

Every `interval` steps between `initial` and `final` the e of all triplets but the b(t) best are set
to 0; they may grow again until the next time. From `final` on those that are out stay out:

    b(t) = b_T + (b_0 - b_T) (1 - (t - initial) / (final - initial))^3, rounded down

The loss has `orthogonality` times the mean of ||A^T A - 1||_F and ||B B^T - 1||_F of all factors.
Arrays keep their shapes; a fold adds what is left. The factor of the addition is that of `lora`,
where PEFT has alpha / (r + 1e-5).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmoe.adapters.base import STATE, State, StepGiven
from jaxmoe.adapters.factors import MatrixFactorsConfig, by_path, factor_rows, nest, values_row
from jaxmoe.field_docs import with_field_docs
from jaxmoe.parameters import Hyperparameters, ParameterSpec, ParameterTable
from sharding.constrain import Placement, place_like
from sharding.rules import LogicalAxisRules

_SMALL = Hyperparameters(init_std=0.02, fan_in_power=0.0, weight_decay_multiplier=0.0)
_TINY = 1e-30


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdaLoraConfig(MatrixFactorsConfig):
    """Low-rank additions whose ranks shrink where they matter least."""

    name: ClassVar[str] = "adalora"
    has_after_step: ClassVar[bool] = True

    alpha: float = 32.0
    """The addition is multiplied with alpha over the inner width of the matrix's own factors."""
    target_rank: int = 8
    """Mean inner width that is left in the end; rank is that in the beginning."""
    initial: int = 20
    """Step after which the budget falls; counted from the start, whatever training.steps is."""
    final: int = 120
    """Step at which it has fallen to target_rank; the triplets that are left then stay. A run of
    fewer steps ends above target_rank: set it from training.steps, such as to 0.7 of them."""
    interval: int = 10
    """Steps between choices of the triplets that stay."""
    orthogonality: float = 0.1
    """Weight of the loss that keeps the columns of A and the rows of B orthonormal."""
    sensitivity_decay: float = 0.85
    """Decay rate of the average of sensitivities (beta_1)."""
    uncertainty_decay: float = 0.85
    """Decay rate of the average of their deviations (beta_2)."""

    def __post_init__(self):
        MatrixFactorsConfig.__post_init__(self)
        if not 0 < self.target_rank <= self.rank:
            raise ValueError(
                f"adapter.target_rank={self.target_rank} must be at least 1 and at most"
                f" adapter.rank={self.rank}"
            )
        if not 0 <= self.initial < self.final:
            raise ValueError(
                f"adapter.initial={self.initial} must be at least 0 and below"
                f" adapter.final={self.final}"
            )
        if self.interval < 1:
            raise ValueError(f"adapter.interval={self.interval} must be at least 1")
        if not self.orthogonality >= 0:
            raise ValueError(f"adapter.orthogonality={self.orthogonality} must be 0 or more")
        for field in ("sensitivity_decay", "uncertainty_decay"):
            if not 0 < (value := getattr(self, field)) < 1:
                raise ValueError(f"adapter.{field}={value} must lie between 0 and 1")

    def note_on(self, steps: int) -> str | None:
        """Say where the run ends before the budget has fallen; see the base class."""
        if self.final <= steps:
            return None
        return (
            f"adapter.final={self.final} lies behind the last step, {steps}: more than"
            f" adapter.target_rank={self.target_rank} is left then; set final to 0.7 of the steps,"
            f" {max(round(0.7 * steps), 1)}, and initial below it"
        )

    def rows_of(
        self, row: ParameterSpec, is_adapted: tuple[bool, ...], rules: LogicalAxisRules
    ) -> list[ParameterSpec]:
        """Return the rows of the triplets of a matrix; see `MatrixFactorsConfig.rows_of`."""
        rank = self.rank_of(row)
        scales = tuple(self.alpha / rank if has_adapter else 0.0 for has_adapter in is_adapted)
        factors = factor_rows(row, rank, scales, rules, hyper=_SMALL, up_init="normal")
        return [*factors, values_row(row, rank, rules, "zeros")]

    def losses(self, params: Any, placement: Placement) -> dict[str, Float[Array, ""]]:
        """Return the loss of factors that are not orthonormal; see `Adapter.losses`."""
        if not self.orthogonality:
            return {}
        flat = by_path(params)
        total = jnp.zeros(())
        number = jnp.zeros(())
        for path in _matrices(flat):
            scale = flat[f"{path}:scale"]
            for factor in _wide_factors(flat, path, placement):
                far = _distance(factor)
                is_live = (scale != 0).astype(jnp.float32)
                is_live = is_live.reshape(is_live.shape + (1,) * (far.ndim - is_live.ndim))
                total += jnp.sum(far * is_live)
                number += jnp.sum(is_live) * (far.size // is_live.size)
        return {"orthogonality": self.orthogonality * total / number}

    def first_state(self, params: Any, table: ParameterTable, key: Array) -> Any:
        """Return averages of zero and all triplets in; see `Adapter.first_state`."""
        del table, key
        flat = by_path(params)
        paths = _matrices(flat)
        names = [f"{path}:{name}" for path in paths for name in ("down", "up", "values")]
        kinds = ("sensitivity", "uncertainty")
        # Arrays of their own: a step donates both.
        zeros = {
            kind: {path: jnp.zeros_like(flat[path], jnp.float32) for path in names}
            for kind in kinds
        }
        live = {path: jnp.ones_like(flat[f"{path}:values"], bool) for path in paths}
        flats = zeros | {"live": live}
        return {name: nest(one) for name, one in flats.items()}

    def after_step(self, state: State, grads: Any, step_inputs: StepGiven) -> State:
        """Return the state with new averages, and now and then a choice of triplets."""
        now: Any = state
        step = now.step
        params = by_path(now.params)
        state_by_path = by_path(self.own_state(now))
        slopes = by_path(grads)
        is_open = step < self.final
        for path in [path for path in state_by_path if path.startswith("sensitivity/")]:
            name = path.removeprefix("sensitivity/")
            weight, slope = (tree[name].astype(jnp.float32) for tree in (params, slopes))
            uncertainty = f"uncertainty/{name}"
            first, second = self.averages(
                weight, slope, state_by_path[path], state_by_path[uncertainty]
            )
            state_by_path[path] = jnp.where(is_open, first, state_by_path[path])
            state_by_path[uncertainty] = jnp.where(is_open, second, state_by_path[uncertainty])
        state_by_path |= self._chosen(state_by_path, step_inputs.table, step, step_inputs.placement)
        is_masked = self._chooses(step) | (step > self.final)
        for path in _matrices(params):
            values = params[f"{path}:values"]
            keeps = state_by_path[f"live/{path}"] | ~is_masked
            params[f"{path}:values"] = jnp.where(keeps, values, jnp.zeros_like(values))
        return dataclasses.replace(
            now, params=nest(params), parts={**now.parts, STATE: nest(state_by_path)}
        )

    def averages(
        self, weight: Array, slope: Array, sensitivity: Array, uncertainty: Array
    ) -> tuple[Array, Array]:
        """Return the averages of sensitivity and uncertainty after a step.

        Args:
            weight: Parameters after the update.
            slope: Gradients.
            sensitivity: Average before (I).
            uncertainty: Average before (U).
        """
        now = jnp.abs(weight * slope)
        first = self.sensitivity_decay
        second = self.uncertainty_decay
        sensitivity = first * sensitivity + (1.0 - first) * now
        return sensitivity, second * uncertainty + (1.0 - second) * jnp.abs(now - sensitivity)

    def budgets(self, table: ParameterTable) -> tuple[int, int]:
        """Return the number of triplets in the beginning and in the end.

        Args:
            table: Parameter table of the adapted model.
        """
        counts = [int(is_live.sum()) for is_live in _use(table).values()]
        first = sum(counts)
        return first, max(1, first * self.target_rank // self.rank)

    def budget(self, step: int, table: ParameterTable) -> int:
        """Return the number of triplets at a step, b(t).

        Args:
            step: Steps done (t).
            table: Parameter table of the adapted model.
        """
        first, last = self.budgets(table)
        if step <= self.initial:
            return first
        if step >= self.final:
            return last
        share_left = 1 - (step - self.initial) / (self.final - self.initial)
        return int((first - last) * share_left**3 + last)

    def _chooses(self, step: Any) -> Any:
        is_between = (step > self.initial) & (step < self.final)
        return (is_between & (step % self.interval == 0)) | (step == self.final)

    def _chosen(
        self, state: dict[str, Array], table: ParameterTable, step: Array, placement: Placement
    ) -> dict[str, Bool[Array, ...]]:
        """Return which triplets are in, {live/<path>: [*G r]}, after a step.

        Args:
            state: State of the adapter, by path.
            table: Parameter table of the adapted model.
            step: Steps done.
            placement: Layout rules.
        """
        is_live = _use(table)
        flats = []
        for path, is_used in is_live.items():
            score = placement.place(_score(state, path), (None,) * is_used.ndim)
            flats.append(jnp.where(is_used, score, -1.0).ravel())  # scores are 0 or more
        scores = jnp.concatenate(flats)
        # The budget of each choice in whole numbers: f32 might round down to the one below.
        every = range(0, self.final, self.interval)
        budgets = jnp.asarray(
            np.array([self.budget(step_number, table) for step_number in every], np.int32)
        )
        last = self.budgets(table)[1]
        number = jnp.where(
            step >= self.final, last, budgets[jnp.minimum(step, self.final - 1) // self.interval]
        )
        places = jnp.argsort(jnp.argsort(scores, stable=True))
        is_in = places >= scores.size - number
        masks = {}
        start = 0
        for path, is_used in is_live.items():
            part = is_in[start : start + is_used.size].reshape(is_used.shape)
            start += is_used.size
            before = state[f"live/{path}"]
            new = jnp.where(self._chooses(step), place_like(part, before), before)
            masks[f"live/{path}"] = new
        return masks


def _matrices(flat: dict[str, Any]) -> list[str]:
    """Return the paths of the adapted matrices."""
    return [path.removesuffix(":values") for path in flat if path.endswith(":values")]


def _use(table: ParameterTable) -> dict[str, Bool[np.ndarray, ...]]:
    """Return which triplets of each matrix are in layers that are adapted, [*G r]."""
    rows = {row.path: row for row in table}
    masks = {}
    for path in _matrices(rows):
        scales = np.array(rows[f"{path}:scale"].declaration.init, np.float32)
        shape = rows[f"{path}:values"].shape
        scales = scales.reshape(rows[f"{path}:scale"].shape)
        wide = scales.reshape(scales.shape + (1,) * (len(shape) - scales.ndim))
        masks[path] = np.broadcast_to(wide != 0.0, shape)
    return masks


def _score(state: dict[str, Array], path: str) -> Float[Array, "*G r"]:
    """Return the scores of the triplets of a matrix.

    Args:
        state: State of the adapter, by path.
        path: Path of the matrix.
    """

    def scores(name: str) -> Array:
        return state[f"sensitivity/{path}:{name}"] * state[f"uncertainty/{path}:{name}"]

    values, down, up = map(scores, ("values", "down", "up"))
    batch = values.ndim - 1
    total = values + jnp.mean(down, axis=tuple(range(batch, down.ndim - 1)))
    return total + jnp.mean(up, axis=tuple(range(batch + 1, up.ndim)))


def _wide_factors(
    flat: dict[str, Array], path: str, placement: Placement
) -> tuple[Float[Array, "*G r n"], ...]:
    """Return A, turned, and B, whole on each device, with the inner width before the other side."""
    batch = flat[f"{path}:values"].shape[:-1]
    down, up = (flat[f"{path}:{name}"].astype(jnp.float32) for name in ("down", "up"))
    down, up = (placement.place(factor, (None,) * factor.ndim) for factor in (down, up))
    rank = down.shape[-1]
    return jnp.swapaxes(down.reshape(*batch, -1, rank), -1, -2), up.reshape(*batch, rank, -1)


def _distance(factor: Float[Array, "*G r n"]) -> Float[Array, "*G"]:
    """Return the Frobenius norm of F F^T - 1."""
    product = jnp.einsum("...rn,...sn->...rs", factor, factor, preferred_element_type=jnp.float32)
    unit = jnp.eye(factor.shape[-2], dtype=jnp.float32)
    unit = jnp.broadcast_to(unit, product.shape)
    return jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(product - unit), axis=(-2, -1)), _TINY))
