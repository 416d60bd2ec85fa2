# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What happens around the steps: reporting, evaluating, saving. The loop calls, hooks decide when.

To add one: a class with `is_due` and `run`, and a line where the hooks are put together
(`experiments/pretrain.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.data.batch import Batch
from jaxmoe.training.evaluate import Evaluation, evaluate
from jaxmoe.training.state import TrainState


@runtime_checkable
class Hook(Protocol):
    """Something done after certain steps."""

    def is_due(self, step: int) -> bool:
        """Whether to run after this many steps."""
        ...

    def run(self, step: int, state: TrainState) -> None:
        """Runs; the state is only read."""
        ...


def is_every(step: int, every: int, last_step: int) -> bool:
    """Whether `step` is a multiple of `every`, or the last one; `every` 0: only the last."""
    return step == last_step or (every > 0 and step % every == 0)


class EvaluateHook:
    """Held-out loss, every so many steps and at the end.

    Args:
        eval_step: from `make_eval_step`.
        batches: makes the held-out batches anew, on the devices.
        every: steps.
        last_step: of the run.
        report: called with the step and the result.
    """

    def __init__(
        self,
        eval_step: Callable[..., Any],
        batches: Callable[[], Iterable[Batch]],
        *,
        every: int,
        last_step: int,
        report: Callable[[int, Evaluation], None],
    ):
        self._eval_step, self._batches = eval_step, batches
        self._every, self._last_step = every, last_step
        self._report = report

    def is_due(self, step: int) -> bool:
        """Every so many steps and at the end."""
        return is_every(step, self._every, self._last_step)

    def run(self, step: int, state: TrainState) -> None:
        """Evaluates and reports."""
        result = evaluate(self._eval_step, state.params, state.router_state, self._batches())
        self._report(step, result)


class CheckpointHook:
    """Saves every so many steps and at the end.

    A loop that was stopped leaves its last state to whoever runs it, who calls this once more.

    Args:
        manager: where to.
        config: the run's config as JSON.
        position: data position after so many steps.
        every: steps.
        last_step: of the run.
        before: called before each save (to flush what belongs to the steps saved).
    """

    def __init__(
        self,
        manager: CheckpointManager,
        *,
        config: dict[str, Any],
        position: Callable[[int], dict[str, Any]],
        every: int,
        last_step: int,
        before: Callable[[], None],
    ):
        self._manager, self._config, self._position = manager, config, position
        self._every, self._last_step, self._before = every, last_step, before
        self.saved_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Every so many steps and at the end."""
        return is_every(step, self._every, self._last_step)

    def run(self, step: int, state: TrainState) -> None:
        """Starts a save; a failed one is reported by the manager and the run goes on."""
        self._before()
        position = self._position(step)
        if self._manager.save(step, state, config=self._config, data=position):
            self.saved_step = step
