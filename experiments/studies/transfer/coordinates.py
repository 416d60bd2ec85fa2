# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures sizes of activations, and of their changes in a few steps, along an axis.

    value    RMS of the quantity on a fixed batch
    change   RMS of its difference to the initial one, after 1, 2, ... steps at the same rate
    slope    slope of log RMS over log of the axis value, mean over seeds, least squares

Where a rate transfers, nothing grows with the axis: every slope is at most GROWTH. A falling
quantity is judged by its change at the last step only: an initial value may fall by design (logits
under muP fall as 1 / sqrt(width)), while a falling change belongs to a part that hardly learns at
the larger size. HyperP as published fails by its logits, whose head has one std at every width;
`HyperPConfig.logit_bound` corrects it. Quantities: the embedded tokens, outputs of attention and
feed-forward (root mean square over layers, residual multiplier included), the stream before the
last norm, the logits.

Source: arXiv 2203.03466, appendix D.1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import Transformer

QUANTITIES = ("embedding", "attention", "feed_forward", "stream", "logits")
GROWTH = 0.25
"""Largest slope of a value or a change: a power of the axis, with room for noise."""
FALL = -0.6
"""Smallest slope of a change at the last step."""


def observe(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    router_state: Any,
    tokens: Int[Array, "B S"],
) -> dict[str, Float[Array, ...]]:
    """Return the quantities of one forward pass.

    Args:
        model: Model config with its multipliers.
        execution: Where and how the model is computed.
        params: Parameters of the model.
        router_state: Router state, stacked over MoE layers.
        tokens: Tokens of the fixed batch, [B S].
    """
    output, captured = Transformer(model, execution).apply(
        {"params": params},
        tokens,
        router_state=router_state,
        capture_intermediates=_is_branch,
        mutable=["intermediates"],
    )
    multipliers = model.forward_multipliers
    parts: dict[str, list[Array]] = {"attention": [], "feed_forward": []}
    stream = None
    for stack in model.stacks:
        inside: Any = functools.reduce(
            lambda tree, name: tree[name], stack.path.split("/"), captured["intermediates"]
        )
        ((flow, _),) = inside["__call__"]
        stream = flow.x[-1]
        ((attended, _),) = inside[stack.kind.mixer.module_name]["__call__"]
        parts["attention"].append(attended)
        ((fed, _),) = inside[stack.kind.feed_forward.module_name]["__call__"]
        parts["feed_forward"].append(fed)
    assert stream is not None
    coordinates = {"embedding": params["embedding"]["weight"][tokens] * multipliers.embedding}
    for name, branches in parts.items():
        coordinates[name] = jnp.concatenate(branches) * multipliers.residual
    return coordinates | {"stream": stream, "logits": jnp.asarray(output.logits)}


def _is_branch(module: nn.Module, method: str) -> bool:
    names = ("attention", "moe", "feed_forward")
    is_branch = isinstance(module, Block) or module.name in names
    return method == "__call__" and is_branch


@jax.jit
def sizes(
    now: Mapping[str, Array], first: Mapping[str, Array]
) -> dict[str, tuple[Float[Array, ""], Float[Array, ""]]]:
    """Return the RMS of each quantity, and of its change.

    Args:
        now: Result of `observe`.
        first: Result of `observe` before training.
    """

    def rms(x: Array) -> Float[Array, ""]:
        return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))

    return {name: (rms(now[name]), rms(now[name] - first[name])) for name in QUANTITIES}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Coordinate:
    """One quantity along the axis."""

    quantity: str
    value_slopes: tuple[float, ...]
    """Slopes of the value by step, the initial one first."""
    change_slopes: tuple[float, ...]
    """Slopes of the change by step, from the first step on."""

    @property
    def problem(self) -> str | None:
        """Reason of a failure; None if the quantity passes."""
        changes = self.change_slopes
        if not np.isfinite([*self.value_slopes, *changes]).all():
            return "not finite"
        grown = max(changes)
        if grown > GROWTH:
            return f"change grows as ^{grown:.2f} after step {changes.index(grown) + 1}"
        values = self.value_slopes
        if max(values) > GROWTH:
            return f"grows as ^{max(values):.2f} at step {values.index(max(values))}"
        if changes[-1] < FALL:
            return f"change falls as ^{changes[-1]:.2f}"
        return None


def coordinates_of(
    points: Sequence[float], measured: Mapping[str, np.ndarray]
) -> tuple[Coordinate, ...]:
    """Return the slopes of every quantity.

    Args:
        points: Values of the axis.
        measured: By quantity, [points seeds steps+1 2]: value and change, the initial one first.
    """
    x = np.log(np.asarray(points, float))

    def slopes(column: np.ndarray) -> tuple[float, ...]:
        with np.errstate(divide="ignore", invalid="ignore"):
            y = np.log(column).mean(1)  # points, steps
        if not np.isfinite(y).all():
            return (float("nan"),) * y.shape[1]
        return tuple(float(value) for value in np.polyfit(x, y, 1)[0])

    return tuple(
        Coordinate(
            quantity=name,
            value_slopes=slopes(array[..., 0]),
            change_slopes=slopes(array[:, :, 1:, 1]),
        )
        for name, array in measured.items()
    )
