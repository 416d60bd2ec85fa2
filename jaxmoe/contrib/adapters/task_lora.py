# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One LoRA for each part of the data, trained together.

    y = x W + alpha / r (x A_t) B_t          t the task of the token

The task of a row is the number of its part in `data:mixture`, in the order of `data.mix`, or
`Batch.extra["task"]` [B S]; rows without one have `adapter.task`, and those of task -1 have no
addition. The tokens of a batch are sorted by task for each product: n tasks cost what one LoRA
does, and sequences of different tasks can share a batch.

Several LoRA adapters of one model become one of these, to be served side by side: smaller ranks are
padded with zeros, a matrix that an adapter leaves alone has zeros, and the scale of each adapter is
multiplied into its B. A token of task -1 has the model itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from flax import traverse_util
from jaxtyping import Array

from jaxmoe.adapters.base import Adapter, TargetsConfig
from jaxmoe.adapters.fold import is_factor
from jaxmoe.adapters.lora import lora_of
from jaxmoe.contrib.adapters.mixed import MIXED_ROLES, FactorTraits, MixedAdapter, task_ids
from jaxmoe.contrib.adapters.mixtures import FactorMembers
from jaxmoe.declarations import FACTORS
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.view import HalfInputs, Losses
from sharding.constrain import Placement


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskLoraConfig(MixedAdapter):
    """One LoRA for each part of data:mixture; all else is frozen."""

    name: ClassVar[str] = "task_lora"
    reads: ClassVar[tuple[str, ...]] = ("task",)
    late_fields: ClassVar[tuple[str, ...]] = ("task",)

    alpha: float = 16.0
    """The mixture is multiplied with alpha / rank."""
    task: int = 0
    """Task of rows that have none, such as prompts; -1: they have no addition."""

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return self.members

    @property
    def factor_traits(self) -> FactorTraits:
        """Properties of the factors of all additions."""
        return FactorTraits(share=1.0 / self.members)

    def check_fields(self) -> None:
        """Raise a ValueError for invalid values."""
        if not -1 <= self.task < self.members:
            raise ValueError(
                f"adapter.task={self.task} must be at least 0 and at most {self.members - 1}"
                f" (adapter.members={self.members}), or -1 for no addition"
            )

    def mix(
        self, params: dict[str, Array], half: HalfInputs, placement: Placement, *, train: bool
    ) -> tuple[FactorMembers, Losses]:
        """Return the task of each token; see `MixedAdapter`."""
        del params, placement, train
        return FactorMembers(ids=task_ids(half, self.task)), {}

    @staticmethod
    def check_together(name: str, adapter: Adapter | None) -> None:
        """Refuse an adapter that cannot be served beside others; see `check_together`."""
        check_together(name, adapter)

    @staticmethod
    def together(
        params: Any, adapters: Mapping[str, tuple[Adapter, Any]]
    ) -> tuple[TaskLoraConfig, Any]:
        """Return one adapter of several, and the parameters with it; see `together`."""
        return together(params, adapters)


def check_together(name: str, adapter: Adapter | None) -> None:
    """Refuse an adapter that cannot stand beside others.

    Args:
        name: Name of the adapter.
        adapter: Config of the adapter; None where a model has none.

    Raises:
        ValueError: It is no LoRA, or adapts matrices of experts or of the whole model.
    """
    way = "serve this run alone, or fold it (jaxmoe checkpoint convert --fold True)"
    if adapter is None:
        raise ValueError(f"adapters: {name} names a run without an adapter: name one of finetune")
    if lora_of(adapter) is None or adapter.has_after_step or adapter.moves_base:
        raise ValueError(
            f"adapters: {name} has adapter:{adapter.name}, and several adapters are served together"
            f" if all are adapter:lora: {way}"
        )
    targets: Any = adapter
    if unmixed := [role for role in targets.targets.roles if role not in MIXED_ROLES]:
        raise ValueError(
            f"adapters: {name} adapts {' and '.join(unmixed)}, and what differs from token to token"
            f" can be added to {', '.join(MIXED_ROLES)}: {way}"
        )


def together(
    params: Any, adapters: Mapping[str, tuple[Adapter, Any]]
) -> tuple[TaskLoraConfig, Any]:
    """Return the adapter of all, and the parameters of the model with it.

    Args:
        params: Parameters of the model, nested dicts.
        adapters: Config and parameters of each adapter by name, those of `params` or without them;
            task i is the i-th.

    Raises:
        ValueError: See `check_together`.
    """
    for name, (adapter, _) in adapters.items():
        check_together(name, adapter)
    flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
    members: list[dict[str, Any]] = [
        {path: np.asarray(value) for path, value in _flat(member).items() if is_factor(path)}
        for _, member in adapters.values()
    ]
    downs = [
        (path, x) for member in members for path, x in member.items() if path.endswith(":down")
    ]
    paths = sorted({path.removesuffix(":down") for path, _ in downs})
    rank = max(x.shape[-1] for _, x in downs)
    for path in paths:
        flat |= _stack(path, flat[path].ndim, members, rank)
    configs: list[Any] = [adapter for adapter, _ in adapters.values()]
    roles = tuple(dict.fromkeys(role for adapter in configs for role in adapter.targets.roles))
    config = TaskLoraConfig(
        members=len(adapters), rank=rank, task=-1, targets=TargetsConfig(roles=roles)
    )
    return config, traverse_util.unflatten_dict(flat, sep="/")


def _flat(tree: Any) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep="/")


def _stack(path: str, ndim: int, owns: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Return the factors of all adapters for one matrix.

    Args:
        path: Matrix.
        ndim: Its number of dimensions, those of layers included.
        owns: Factors of each adapter.
        rank: Inner width of the result.
    """
    names = [f"{path}:{factor}" for factor in FACTORS]
    example = next(tuple(params[name] for name in names) for params in owns if names[0] in params)
    batch = example[0].ndim + example[1].ndim - 2 - ndim
    downs = []
    ups = []
    for params in owns:
        down, up, scale = (params.get(name) for name in names)
        if down is None or up is None or scale is None:
            down, up, scale = (np.zeros_like(leaf) for leaf in example)
        up = up * scale.reshape(scale.shape + (1,) * (up.ndim - scale.ndim))
        downs.append(_pad(down, down.ndim - 1, rank))
        ups.append(_pad(up, batch, rank))
    return {
        f"{path}:downs": np.stack(downs, axis=-2),
        f"{path}:ups": np.stack(ups, axis=batch),
        f"{path}:scale": np.ones_like(example[2]),
    }


def _pad(factor: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """Return a factor with zeros up to the inner width."""
    if factor.shape[axis] == rank:
        return factor
    shape = (*factor.shape[:axis], rank - factor.shape[axis], *factor.shape[axis + 1 :])
    return np.concatenate([factor, np.zeros(shape, factor.dtype)], axis)
