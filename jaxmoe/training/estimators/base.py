# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Protocol of the estimators: how a step gets its gradient.

An estimator is a config. `init` returns the state that it carries from step to step, or None, and
`estimate` the gradients of one step. The optimiser, the guard, checkpoints and reports are those of
every step.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from jaxtyping import Array, Float

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.optim import LinearConfig, Optimizer, SGDConfig
from jaxmoe.parameters import ParameterTable
from jaxmoe.replicas import ReplicasConfig
from jaxmoe.training import ObjectiveConfig
from jaxmoe.training.accumulation import Gradients
from jaxmoe.training.balance import AccumulatedBalance
from jaxmoe.training.pipeline.skipping import SkippingConfig
from jaxmoe.training.state import TrainState

PLAIN_DESCENT: Mapping[str, Any] = {
    "optimizer": SGDConfig(learning_rate=1e-4),
    "schedule": LinearConfig(warmup_steps=0, floor=1.0),
    "training.clip": None,
}
"""What methods bring that are defined by gradient descent at a constant rate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What a step differentiates; fields as of `jaxmoe.training.gradients.batch_gradients`."""

    model: ModelConfig
    execution: ExecutionConfig
    objective: ObjectiveConfig
    accumulation: int = 1
    accumulated_balance: AccumulatedBalance = "buffer"
    workers: int = 1
    table: ParameterTable | None = None
    skipping: SkippingConfig | None = None
    clip: float | None = None
    has_probes: bool = False
    """Whether the optimiser reads the gradients of probes."""


class Estimate(NamedTuple):
    """Gradients of one step."""

    weight: Float[Array, ""]
    """Sum of the loss weights."""
    summed: Gradients
    """Sums over the batch."""
    worker_loss: Float[Array, " W"] | None = None
    """Losses of the workers that are reported apart."""
    state: Any = None
    """State of the estimator after the step."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimator(abc.ABC):
    """Base class of the estimators."""

    name: ClassVar[str]
    """Key in the registry."""
    clips: ClassVar[Literal["norm", "projection", "nothing"]]
    """What training.clip limits: the global norm of the gradient; each derivative along a
    direction; or nothing, and then it must be None."""
    optimizers: ClassVar[tuple[str, ...]] = ()
    """Optimisers that the method is defined with; empty for any."""
    brings: ClassVar[Mapping[str, Any]] = {}
    """Values of other fields of a run, by dotted path, that come with the choice of the estimator
    on a command line where nothing else is named."""
    is_backward: ClassVar[bool] = False
    """Whether there is a backward pass, of whole layers and of each worker's rows."""

    def check_run(self, replicas: ReplicasConfig, gradients_every: int) -> None:
        """Refuse what needs a backward pass, of the run or of each worker.

        Args:
            replicas: What the workers of the run exchange.
            gradients_every: Steps between comparisons of gradients; 0 for none.

        Raises:
            ValueError: There is no backward pass, and gradients are exchanged or compared.
        """
        chosen = f"training.gradients:{self.name}"
        if not self.is_backward and replicas.exchanges != "nothing":
            raise ValueError(
                f"{chosen} has no gradients for replicas:{replicas.name} to exchange: choose"
                " replicas:none"
            )
        if not self.is_backward and gradients_every:
            raise ValueError(
                f"watch.gradients_every={gradients_every} compares gradients of backward passes,"
                f" and {chosen} has none: set it to 0"
            )

    def check_update(self, optimizer: Optimizer, clip: float | None) -> None:
        """Refuse an optimiser, or a limit of derivatives, that makes another method of it.

        Args:
            optimizer: Optimiser of the run.
            clip: training.clip.

        Raises:
            ValueError: Names what the method is defined with.
        """
        chosen = f"training.gradients:{self.name}"
        if self.optimizers and optimizer.name not in self.optimizers:
            named = " or ".join(f"optimizer:{name}" for name in self.optimizers)
            raise ValueError(
                f"optimizer:{optimizer.name} divides a gradient by its size, and {chosen} is"
                f" defined by steps in proportion to the derivatives: choose {named}"
            )
        if self.clips == "projection" and clip is not None:
            raise ValueError(
                f"training.clip={clip} limits each derivative along a direction, which is as large"
                f" as the norm of the gradient, and leaves of {chosen} little more than signs: set"
                " training.clip to None"
            )

    def init(self, table: ParameterTable) -> Any:
        """Return the state before the first step; None for an estimator without one.

        Args:
            table: Parameters of the model.
        """
        del table
        return None

    @abc.abstractmethod
    def estimate(
        self, problem: Problem, state: TrainState, batch: Batch, first_row: Any = 0
    ) -> Estimate:
        """Return the gradients of one step.

        Args:
            problem: What is differentiated.
            state: State before the step.
            batch: Rows of the step.
            first_row: Number of the first row, where the batch is part of a larger one.
        """

    def check(self, problem: Problem) -> None:
        """Refuse what the estimator cannot do, before anything is traced.

        Args:
            problem: With the mesh resolved.

        Raises:
            ValueError: See the estimator.
        """
        del problem

    def check_clip(self, clip: float | None) -> None:
        """Refuse a limit that means nothing for the estimator.

        Args:
            clip: training.clip.

        Raises:
            ValueError: There is one.
        """
        if clip is not None and self.clips == "nothing":
            raise ValueError(
                f"training.clip={clip} limits the norm of a gradient, and that of"
                f" training.gradients:{self.name} has no meaning: set training.clip to None"
            )

    @property
    def num_passes(self) -> float:
        """Cost of a step in forward passes."""
        return 3.0

    def describe(self, problem: Problem) -> str | None:
        """Return the cost of a step in words; None for nothing to say.

        Args:
            problem: With the mesh resolved.
        """
        del problem
        return None
