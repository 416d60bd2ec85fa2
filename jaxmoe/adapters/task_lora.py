# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One LoRA for each part of the data, trained together.

    y = x W + alpha / r (x A_t) B_t          t the task of the token

The task of a row is the number of its part in `data:mixture`, in the order of `data.mix`, or
`Batch.extra["task"]` [B S]; rows without one have `adapter.task`, and those of task -1 have no
addition. The tokens of a batch are sorted by task for each product: n tasks cost what one LoRA
does, and sequences of different tasks can share a batch.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxtyping import Array

from jaxmoe.adapters.mixed import MixedAdapter, task_ids
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.mixing import Losses, MixingInputs
from sharding.constrain import Placement
from sharding.products.mixtures import Members


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskLoraConfig(MixedAdapter):
    """One LoRA for each part of data:mixture; all else is frozen."""

    name: ClassVar[str] = "task_lora"
    reads: ClassVar[tuple[str, ...]] = ("task",)

    task: int = 0
    """Task of rows that have none, such as prompts; -1: they have no addition."""

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return self.members

    @property
    def share(self) -> float:
        """Part of the factors with which a token is multiplied."""
        return 1.0 / self.members

    def check_fields(self) -> None:
        """Raise a ValueError for invalid values."""
        if not -1 <= self.task < self.members:
            raise ValueError(
                f"adapter.task={self.task} must be from 0 to {self.members - 1}"
                f" (adapter.members={self.members}), or -1 for no addition"
            )

    def mix(
        self, own: dict[str, Array], given: MixingInputs, placement: Placement, *, train: bool
    ) -> tuple[Members, Losses]:
        """Return the task of each token; see `MixedAdapter`."""
        del own, placement, train
        return Members(ids=task_ids(given, self.task)), {}
