# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes how RoPE turns queries and keys, in both spellings of `transformers`.

    version 4    rope_theta, rope_scaling {type, factor, ...}, partial_rotary_factor
    version 5    rope_parameters {rope_type, rope_theta, partial_rotary_factor, factor, ...}

Both may be present and must say the same. Lengths that are absent there are those of the config
(original_max_position_embeddings, max_position_embeddings), as in `transformers`.

To add a kind of scaling: a row in `_KINDS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.layers.rotary import (
    DynamicScalingConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeConfig,
    RopeScaling,
    YarnConfig,
)

_LENGTH = "original_max_position_embeddings"
_LONGEST = "max_position_embeddings"
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


class Rope(NamedTuple):
    """How RoPE turns the heads of a model."""

    theta: float
    """Base of the wavelengths."""
    share: float
    """Share of the features of a head that turn."""
    scaling: RopeScaling | None
    """Stretching of the wavelengths; None for none."""

    def width(self, head_dim: int) -> int | None:
        """Return the features that turn; None for all of a head's.

        Args:
            head_dim: H.
        """
        width = int(head_dim * self.share)
        return None if width == head_dim else width


def read_rope(
    fields: Fields, theta: float, *, share: float = 1.0, kinds: Collection[str] | None = None
) -> Rope:
    """Return the RoPE of a config.

    Args:
        fields: Fields of a config.
        theta: Base where the config has none.
        share: Share of a head that turns where the config has none.
        kinds: Kinds of scaling that the attention has; all of them when None.

    Raises:
        CheckpointError: A kind or a field is not supported, is missing, or is there twice.
    """
    thetas = {fields.get("rope_theta")}
    shares = {fields.get("partial_rotary_factor")}
    scalings: set[RopeScaling | None] = set()
    for name in ("rope_parameters", "rope_scaling"):
        values = fields.get(name, default={})
        rope = {key: value for key, value in values.items() if value is not None}
        thetas.add(rope.get("rope_theta"))
        shares.add(rope.get("partial_rotary_factor"))
        scaling = _scaling(fields, name, rope, kinds or _KINDS)
        # rope_scaling that names none holds against the other; the other may leave it to this one.
        is_none_named = name == "rope_scaling" and not {"rope_type", "type"}.isdisjoint(rope)
        if scaling is not None or (is_none_named and scalings):
            scalings.add(scaling)
    if len(scalings) > 1:
        raise CheckpointError("config.rope_scaling and config.rope_parameters differ")
    return Rope(
        theta=_single("rope_theta", thetas, theta),
        share=_single("partial_rotary_factor", shares, share),
        scaling=next(iter(scalings), None),
    )


def _single(name: str, values: set[Any], default: float) -> float:
    """Return the one value of a field that has several places."""
    numbers = {float(value) for value in values - {None}}
    if len(numbers) > 1:
        raise CheckpointError(f"the config has several {name}: {sorted(numbers)}")
    return numbers.pop() if numbers else default


def _scaling(
    fields: Fields, name: str, rope: Mapping[str, Any], kinds: Collection[str]
) -> RopeScaling | None:
    """Return the scaling of one of the two spellings."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, Mapping) for value in rope.values()) or (
        kind != "default" and kind not in kinds
    ):
        raise CheckpointError(
            f"config.{name}={show_value(dict(rope))} is not supported: RoPE here is of type"
            f" 'default' or {', '.join(map(repr, kinds))}, the same in all layers"
        )
    if kind == "default":
        return None
    names, build = _KINDS[kind]
    unknown = sorted(rope.keys() - _COMMON - set(names.split()))
    if unknown:
        raise CheckpointError(
            f"config.{name}={show_value(dict(rope))}: {', '.join(unknown)} is unknown to RoPE of"
            f" type {kind!r}, which reads {names.replace(' ', ', ')}"
        )
    longest = fields.get(_LONGEST)
    lengths = {_LENGTH: fields.get(_LENGTH, default=longest), _LONGEST: longest}
    values = {key: value for key, value in lengths.items() if value is not None} | dict(rope)
    try:
        return build(values)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"config.{name}={show_value(dict(rope))}: {_TITLES.get(kind, kind)} here needs"
            f" {names.replace(' ', ', ')}, and {error} is missing"
        ) from error


def _dynamic(values: Mapping[str, Any]) -> RopeScaling:
    return DynamicScalingConfig(
        factor=float(values["factor"]), original_length=int(values[_LONGEST])
    )


def _yarn(values: Mapping[str, Any]) -> RopeScaling:
    length = int(values[_LENGTH])
    factor = values.get("factor")
    return YarnConfig(
        factor=float(values[_LONGEST] / length if factor is None else factor),
        original_length=length,
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        mscale=_number(values.get("mscale")),
        mscale_all_dim=_number(values.get("mscale_all_dim")),
        attention_factor=_number(values.get("attention_factor")),
        truncate=bool(values.get("truncate", True)),
    )


def _longrope(values: Mapping[str, Any]) -> RopeScaling:
    length = int(values[_LENGTH])
    factor = values.get("factor")
    return LongRopeConfig(
        short_factor=tuple(map(float, values["short_factor"])),
        long_factor=tuple(map(float, values["long_factor"])),
        original_length=length,
        factor=float(values[_LONGEST] / length if factor is None else factor),
        attention_factor=_number(values.get("attention_factor")),
    )


def _llama3(values: Mapping[str, Any]) -> RopeScaling:
    return Llama3ScalingConfig(
        factor=float(values["factor"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
        original_length=int(values[_LENGTH]),
    )


def _number(value: Any) -> float | None:
    """Return a number; None for an absent one and for 0, which stands for absent."""
    return float(value) if value else None


_KINDS: Final[dict[str, tuple[str, Callable[[Mapping[str, Any]], RopeScaling]]]] = {
    "linear": ("factor", lambda values: LinearScalingConfig(factor=float(values["factor"]))),
    "dynamic": ("factor", _dynamic),
    "yarn": (
        f"factor {_LENGTH} beta_fast beta_slow mscale mscale_all_dim attention_factor truncate",
        _yarn,
    ),
    "longrope": (f"short_factor long_factor factor {_LENGTH} attention_factor", _longrope),
    "llama3": (f"factor low_freq_factor high_freq_factor {_LENGTH}", _llama3),
}
"""Fields of each kind of scaling, and how it is built from them."""
_TITLES = {"yarn": "YaRN", "longrope": "LongRoPE", "llama3": "RoPE of Llama 3"}


def rope_fields(theta: float, share: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the fields of RoPE in both spellings.

    Args:
        theta: Base of the wavelengths.
        share: Share of the features of a head that turn.
        scaling: Stretching of the wavelengths.
    """
    partial = {} if share == 1.0 else {"partial_rotary_factor": share}
    fields: dict[str, Any] = {"rope_theta": theta, **partial}
    if scaling is None:
        rope = {"rope_type": "default", "rope_theta": theta, **partial}
        return fields | {"rope_parameters": rope}
    settings = {field.name: getattr(scaling, field.name) for field in dataclasses.fields(scaling)}
    values: dict[str, Any] = {
        _NAMES.get(name, name): list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
        if value is not None and name not in _OWN
    }
    longest: dict[str, Any] = {}
    if scaling.name == "dynamic":  # its length is that of the config
        longest = {_LONGEST: values.pop(_LENGTH)}
    rope = {"rope_type": scaling.name, "rope_theta": theta, **partial, **values}
    old = {"type": scaling.name, **values}
    return fields | longest | {"rope_parameters": rope, "rope_scaling": old}


_NAMES = {"original_length": _LENGTH}
_OWN = ("rows", "length")
"""Settings that transformers does not have."""
