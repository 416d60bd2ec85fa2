# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the axes of `transfer`: what grows from point to point while everything else stays fixed.

    width        embed_dim alone: heads = width / head_dim, hidden widths in proportion
    depth        layers
    tokens       steps, as multiples of training.steps
    batch        sequences per step, at equal tokens
    granularity  top_k at equal active parameters: expert_dim ~ 1 / top_k, top_k * S experts
    sparsity     num_experts / top_k, at equal active parameters
    balance      coefficient of the load-balancing loss

An axis is a function from a setting (model and training) and a value to another setting. No
function here uses a device.

To add an axis: a function and a row of AXES in experiments/studies/transfer/axes.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmoe.models.config import LayerConfig, MixerBase, ModelConfig, MoEConfig
from jaxmoe.run.config import TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisSetting:
    """The parts of a trial that an axis changes."""

    model: ModelConfig
    training: TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One axis."""

    label: str
    """Meaning of the value, for `--help`."""
    apply: Callable[[AxisSetting, float], AxisSetting]
    """Function from a setting and a value to the setting there; raises ValueError when there is
    none."""
    points: Callable[[AxisSetting], tuple[float, ...]]
    """Values when none are given."""
    is_whole: bool = True
    """Whether values must be whole numbers."""


def _moe(setting: AxisSetting, axis: str) -> MoEConfig:
    if setting.model.moe is None:
        raise ValueError(f"model.moe=none: the axis {axis} needs a mixture of experts")
    return setting.model.moe


def _in_proportion(field: str, old: int, factor: float, value: float, axis: str) -> int:
    """Return a size times a factor.

    Raises:
        ValueError: The product is not a whole number.
    """
    new = old * factor
    if new < 1 or abs(new - round(new)) > 1e-9:
        raise ValueError(
            f"points: {axis} {value:g} makes {field} {new:g} ({old} * {factor:g}), which must be a"
            f" whole number: choose other points or another {field}"
        )
    return round(new)


def _width(setting: AxisSetting, value: float) -> AxisSetting:
    model = setting.model
    factor = value / model.embed_dim

    def size(field: str, old: int) -> int:
        return _in_proportion(field, old, factor, value, "width")

    def scale(path: str, config: Any) -> Any:
        """Return a mixer or feed-forward with its sizes in proportion; None is unchanged."""
        if config is None:
            return None
        values = {field: getattr(config, field) for field in config.width_fields}
        sizes = {
            field: scale(f"{path}.{field}", number)
            if dataclasses.is_dataclass(number)
            else size(f"{path}.{field}", number)
            for field, number in values.items()
            if number is not None
        }
        return dataclasses.replace(config, **sizes)

    def mixer(path: str, config: MixerBase | None) -> Any:
        if config and value % (head_dim := config.head_dim):
            raise ValueError(
                f"points: width {value:g} must be a multiple of {path}.head_dim={head_dim}: heads"
                " are added, not widened"
            )
        return scale(path, config)

    wide = dataclasses.replace(
        model,
        embed_dim=int(value),
        attention=mixer("model.attention", model.attention),
        dense_dim=size("model.dense_dim", model.dense_dim),
        moe=scale("model.moe", model.moe),
        layers=tuple(
            LayerConfig(
                mixer=mixer(f"model.layers.{index}.mixer", layer.mixer),
                feed_forward=scale(f"model.layers.{index}.feed_forward", layer.feed_forward),
            )
            for index, layer in enumerate(model.layers)
        ),
    )
    return dataclasses.replace(setting, model=wide)


def _with_moe(setting: AxisSetting, moe: MoEConfig) -> AxisSetting:
    """Return the setting with another config of all its MoE layers."""
    layers = tuple(
        dataclasses.replace(layer, feed_forward=moe)
        if layer.feed_forward == setting.model.moe
        else layer
        for layer in setting.model.layers
    )
    model = dataclasses.replace(setting.model, moe=moe, layers=layers)
    return dataclasses.replace(setting, model=model)


def _depth(setting: AxisSetting, value: float) -> AxisSetting:
    number = int(value)
    dense = tuple(layer for layer in setting.model.dense_layers if layer < number)
    model = dataclasses.replace(setting.model, num_layers=number, dense_layers=dense)
    return dataclasses.replace(setting, model=model)


def _tokens(setting: AxisSetting, value: float) -> AxisSetting:
    steps = max(1, round(setting.training.steps * value))
    return dataclasses.replace(setting, training=dataclasses.replace(setting.training, steps=steps))


def _batch(setting: AxisSetting, value: float) -> AxisSetting:
    training = setting.training
    size = int(value)
    steps = max(1, round(training.steps * training.batch_size / size))
    training = dataclasses.replace(training, steps=steps, batch_size=size)
    return dataclasses.replace(setting, training=training)


def _granularity(setting: AxisSetting, value: float) -> AxisSetting:
    moe = _moe(setting, "granularity")
    top_k = int(value)

    def scale(field: str, old: int, factor: float) -> int:
        return _in_proportion(f"model.moe.{field}", old, factor, value, "granularity")

    shared = moe.num_shared_experts
    new = dataclasses.replace(
        moe,
        top_k=top_k,
        num_experts=scale("num_experts", moe.num_experts, top_k / moe.top_k),
        expert_dim=scale("expert_dim", moe.expert_dim, moe.top_k / top_k),
        # Shared experts have the width of routed ones: the sum of their widths stays.
        num_shared_experts=shared and scale("num_shared_experts", shared, top_k / moe.top_k),
    )
    return _with_moe(setting, new)


def _sparsity(setting: AxisSetting, value: float) -> AxisSetting:
    moe = _moe(setting, "sparsity")
    new = dataclasses.replace(moe, num_experts=moe.top_k * int(value))
    return _with_moe(setting, new)


def _balance(setting: AxisSetting, value: float) -> AxisSetting:
    moe = _moe(setting, "balance")
    if not any(balancer.traits.is_auxiliary_loss for balancer in moe.balancers):
        names = ", ".join(balancer.name for balancer in moe.balancers) or "none"
        raise ValueError(
            f"model.moe.balancers={names}: the axis balance needs load_balance among them; give"
            " --model.moe.balancers load_balance router_z"
        )
    balancers = tuple(
        dataclasses.replace(balancer, coefficient=value)
        if balancer.traits.is_auxiliary_loss
        else balancer
        for balancer in moe.balancers
    )
    new = dataclasses.replace(moe, balancers=balancers)
    return _with_moe(setting, new)


def _times(size: Callable[[AxisSetting], float], *factors: float) -> Callable[[AxisSetting], tuple]:
    """Return multiples of a size of the setting that are at least 1."""
    return lambda setting: tuple(f * size(setting) for f in factors if f * size(setting) >= 1)


AXES: dict[str, Axis] = {
    "width": Axis(
        label="embed_dim", apply=_width, points=_times(lambda s: s.model.embed_dim, 1, 2, 4)
    ),
    "depth": Axis(
        label="layers", apply=_depth, points=_times(lambda s: s.model.num_layers, 0.5, 1, 2)
    ),
    "tokens": Axis(
        label="times training.steps",
        apply=_tokens,
        points=lambda setting: (1.0, 2.0, 4.0),
        is_whole=False,
    ),
    "batch": Axis(
        label="sequences a step",
        apply=_batch,
        points=_times(lambda s: s.training.batch_size, 0.5, 1, 2),
    ),
    "granularity": Axis(
        label="experts of a token",
        apply=_granularity,
        points=_times(lambda s: _moe(s, "granularity").top_k, 1, 2, 4),
    ),
    "sparsity": Axis(
        label="num_experts / top_k",
        apply=_sparsity,
        points=lambda setting: (2.0, 4.0, 8.0),
    ),
    "balance": Axis(
        label="coefficient of the load-balancing loss",
        apply=_balance,
        points=lambda setting: (1e-3, 1e-2, 1e-1),
        is_whole=False,
    ),
}
