# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Puts a model's values under an adapter, and folds an adapter into plain weights."""

from __future__ import annotations

from typing import Any

from flax import traverse_util

from jaxmoe.adapters.base import Adapter, Layers
from jaxmoe.adapters.view import viewed_everywhere
from jaxmoe.declarations import FACTORS, VALUES
from sharding.products.low_rank import LowRank


def with_base(params: Any, base: Any) -> Any:
    """Return the parameters of an adapted model with the values of another for those it has.

    Args:
        params: Parameters of the adapted model, nested dicts.
        base: Parameters of the model without the adapter.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    return traverse_util.unflatten_dict(flat | traverse_util.flatten_dict(base, sep="/"), sep="/")


def plain(params: Any) -> Any:
    """Return the parameters without the factors of an adapter."""
    flat = traverse_util.flatten_dict(params, sep="/")
    without_factors = {path: value for path, value in flat.items() if not is_factor(path)}
    return traverse_util.unflatten_dict(without_factors, sep="/")


def is_factor(path: str) -> bool:
    """Return whether a path is of a parameter that an adapter has beside those of the model."""
    return ":" in path


def fold_adapters(params: Any, adapter: Adapter | None = None, layers: Layers = ()) -> Any:
    """Return plain parameters, W + s A diag(e) B for each adapted matrix; shapes [L *G *I *O].

    Args:
        params: Parameters of an adapted model, nested dicts of floating arrays.
        adapter: Adapter whose `prepare` and view are applied first; None for plain factors.
        layers: Numbers of the layers of each stack, by the path of the stack.

    Raises:
        ValueError: Additions are mixed for each token.
    """
    if adapter is not None:
        params = viewed_everywhere(adapter, adapter.prepare(params, layers), layers)
    flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
    without_factors = {path: value for path, value in flat.items() if not is_factor(path)}
    if mixed := [path for path in flat if path.endswith(":downs")]:
        raise ValueError(
            f"{mixed[0].removesuffix(':downs')} has several additions, and which of them a token"
            " has depends on the token: there are no plain weights that equal them. Use the run as"
            " it is, or train adapter:lora"
        )
    for path in [path for path in flat if path.endswith(":down")]:
        base = path.removesuffix(":down")
        down, up, scale = (flat[f"{base}:{name}"] for name in FACTORS)
        wide = scale.reshape(scale.shape + (1,) * (without_factors[base].ndim - scale.ndim))
        addition = LowRank(weight=without_factors[base], down=down, up=up, scale=wide)
        without_factors[base] = addition.with_values(flat.get(f"{base}:{VALUES}")).merge()
    return traverse_util.unflatten_dict(without_factors, sep="/")
