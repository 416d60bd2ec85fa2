# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Opens the engine that draws the answers of a run, and reads the model that it is held to."""

from __future__ import annotations

from typing import Any

import jax

from jaxmoe.generation.text import separator_of
from jaxmoe.rl.rollouts import Rollouts
from jaxmoe.routing.replay import why_not_replayed
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.provenance.warm_start import initial_state
from jaxmoe.serve.device.pages import why_not_served


def check_rollouts(assembly: Assembly) -> None:
    """Raise if a run draws answers that the engine cannot compute, or its task cannot be built.

    Args:
        assembly: Plan, devices and data of a run.

    Raises:
        ValueError: The model cannot be served, sequences are cut, there are several processes, or
            the reward's file or function cannot be used.
    """
    if assembly.learner is None:
        return
    assembly.learner.config.reward.build()
    execution = assembly.execution
    if (reason := why_not_served(assembly.plan.model, execution, None)) is not None:
        raise ValueError(f"rl answers prompts with the engine: {reason}")
    if assembly.learner.config.replay:
        if (reason := why_not_replayed(assembly.plan.model)) is not None:
            raise ValueError(f"rl.replay=True: {reason}; or set it to False")
    adapter = assembly.plan.model.adapter
    if adapter is not None and adapter.passes > 1:
        raise ValueError(
            f"model.adapter:{adapter.name} draws its additions anew in each training pass, and rl"
            " compares a pass with the answers of the engine: choose another adapter"
        )
    if execution.mesh.seq > 1:
        raise ValueError(
            f"execution.mesh.seq={execution.mesh.seq} cuts sequences, whose tokens rl compares with"
            " those of the engine: set it to 1"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"rl answers prompts in one process, and there are {jax.process_count()}: start one"
        )


def open_rollouts(assembly: Assembly) -> Rollouts:
    """Return the engine of a run, to be closed by the caller; it compiles at the first step.

    Args:
        assembly: Plan, devices and data of a run with `rl`.
    """
    plan, training = assembly.plan, assembly.plan.config.training
    assert plan.config.rl is not None  # asked by the caller
    separator = separator_of(assembly.source)
    return Rollouts(
        plan.config.rl,
        plan.model,
        assembly.execution,
        assembly.source,
        length=training.sequence_length,
        seed=training.seed,
        ends=() if separator is None else (separator,),
    )


def reference_model(assembly: Assembly) -> tuple[Any, Any] | None:
    """Return parameters and router state of the start; None where the objective reads none.

    Args:
        assembly: Plan, devices and data of a run with `rl`.
    """
    config = assembly.plan.config
    objective: Any = config.training.objective
    if not objective.beta:
        return None
    state = assembly.new_state()
    if config.checkpoint.initial is not None:
        _, state = initial_state(assembly, state)
    return state.params, state.router_state
