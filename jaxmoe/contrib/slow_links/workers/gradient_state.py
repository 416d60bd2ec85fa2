# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""State of workers that exchange gradients, beside that of an ordinary run.

Parameters, optimiser and routers are those of `TrainState`, equal on all workers;
`TrainState.parts["workers"]` has what the exchanges remember.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxmoe.contrib.slow_links.fragments import Leaf, TrainingFacts, flat
from jaxmoe.contrib.slow_links.gradient_method import GradientMethod, begin_gradients
from jaxmoe.contrib.slow_links.workers.arrays import Workers
from jaxmoe.contrib.slow_links.workers.local import with_local
from jaxmoe.contrib.slow_links.workers.places import trained_leaves, workers_of
from jaxmoe.parameters import ParameterTable
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import Step

if TYPE_CHECKING:
    from jaxmoe.contrib.slow_links.gradient_base import GradientBase


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientTraining:
    """A method that exchanges gradients, for one model on one mesh."""

    method: GradientMethod
    workers: Workers
    leaves: dict[str, Leaf]
    """{path: what is known of a parameter}, of those that are trained."""
    step: Step
    """Step of the whole batch, with the optimiser that the method needs."""

    @classmethod
    def of(
        cls, config: GradientBase, table: ParameterTable, step: Step, steps: int
    ) -> GradientTraining:
        """Return the method of a config.

        Args:
            config: Method.
            table: Parameters.
            step: Step of the whole batch; every size of its mesh is filled in.
            steps: Steps of the run.

        Raises:
            ValueError: The mesh has places for another number of workers, the layout of the state
                spans workers, or the method does not suit the number of workers.
        """
        workers = workers_of(config, step.execution)
        leaves = trained_leaves(table)
        return cls(
            method=config.build(TrainingFacts(leaves, workers.number, steps)),
            workers=workers,
            leaves={leaf.path: leaf for leaf in leaves},
            step=step,
        )

    def trained_by_path(self, tree: Any) -> dict[str, Any]:
        """Return the trained parameters of a tree like the parameters, as {path: array}."""
        arrays = flat(tree)
        return {path: arrays[path] for path in self.leaves}

    def begin(self, state: TrainState) -> TrainState:
        """Return the state of a run without workers with that of the exchanges.

        Args:
            state: State of an ordinary run.
        """
        params = self.trained_by_path(state.params)
        local = begin_gradients(self.method, self.leaves, params, self.workers)
        return with_local(state, local)
