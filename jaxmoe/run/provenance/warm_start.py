# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts a new run from the parameters, or from the whole state, of another.

    python -m experiments.pretrain tiny --run.name second --checkpoint.initial runs/pretrain/tiny
    python -m experiments.pretrain branch runs/pretrain/tiny --run.name longer --training.steps 900

The first takes the parameters, by name or by a mapping, from any mesh, and the router state if all
of it has the same shapes. Optimiser state, step and data position start anew; a message lists what
was left behind. The second (`checkpoint.initial_state=all`) takes all arrays, the step and the data
position.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from jaxmoe.checkpoint import CheckpointError, CheckpointManager
from jaxmoe.checkpoint.manifest import CheckpointManifest, describe
from jaxmoe.checkpoint.mapping import Rule, plan_mapping, read_rules
from jaxmoe.checkpoint.restore import restore_part
from jaxmoe.configs import TAG
from jaxmoe.messages import say
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import CheckpointConfig
from jaxmoe.run.provenance.lineage import Source, check_branch
from jaxmoe.training.state import TrainState, state_around


def branched_state(
    assembly: Assembly, target: Any, check: Callable[[CheckpointManifest], None]
) -> tuple[Source, TrainState]:
    """Return the state of a checkpoint of `checkpoint.initial`, which a branch continues.

    Args:
        assembly: Plan, devices and data of the new run.
        target: State, or its shapes and shardings.
        check: Function that raises for the manifest of a checkpoint with other data.

    Raises:
        ValueError: There is no such checkpoint, or it belongs to another model, optimiser or data.
    """
    plan = assembly.plan
    config, training = plan.config.checkpoint, plan.config.training
    directory = _directory(str(config.initial))
    manifest = _manifest(directory, config)
    # As checkpoints hold it: with the forward multipliers in the model.
    check_branch(manifest.config, dataclasses.replace(plan.config, model=plan.model))
    if manifest.step >= training.steps:
        raise ValueError(
            f"checkpoint.initial={config.initial} has done step {manifest.step} of"
            f" training.steps={training.steps}: give more steps, or an earlier"
            " checkpoint.initial_step"
        )
    check(manifest)
    manager = CheckpointManager(directory, is_writer=False, verify=config.verify)
    try:
        state = manager.restore(manifest.step, target)
    finally:
        manager.close()
    return _source(config, manifest), state


def initial_state(assembly: Assembly, state: TrainState) -> tuple[Source, TrainState]:
    """Return the state of a new run with the parameters of `checkpoint.initial`.

    Args:
        assembly: Plan, devices and data of the run.
        state: State before the first step.

    Raises:
        ValueError: There is no such checkpoint, the mapping does not fit, or arrays are missing or
            have another shape or dtype; lists all of them.
    """
    config = assembly.plan.config.checkpoint
    directory, rules = _directory(str(config.initial)), _rules(config)
    manifest = _manifest(directory, config)
    names = plan_mapping(rules, manifest.arrays) if rules else manifest.arrays
    target = {"params": state.params}
    wanted = describe({"router_state": state.router_state}) if state.router_state else {}
    here = {path for path in names if path.startswith("router_state/")}
    is_router_taken = bool(wanted) and all(
        path in manifest.arrays and manifest.arrays[path] == array for path, array in wanted.items()
    )
    if is_router_taken and here == wanted.keys():
        target["router_state"] = state.router_state
    found = restore_part(directory, target, step=manifest.step, mapping=rules, verify=config.verify)
    plan, key = assembly.plan, jax.random.key(assembly.plan.config.training.seed)
    execution = assembly.execution

    def around(params):
        return state_around(
            plan.model,
            plan.optimizer,
            execution,
            params,
            key,
            config.keeps_layer_norms,
            plan.init_estimator,
        )

    with jax.set_mesh(assembly.mesh):
        begun = jax.jit(around)(found["params"])
    begun = begun.replace(router_state=found.get("router_state", begun.router_state))
    begun = assembly.with_workers(begun)
    say(_message(directory, manifest, set(target), bool(wanted) or bool(here)))
    return _source(config, manifest), begun


def _source(config: CheckpointConfig, manifest: CheckpointManifest) -> Source:
    return Source(path=str(config.initial), step=manifest.step, config=manifest.config)


def _directory(path: str) -> pathlib.Path:
    """Return the directory of checkpoints of a run, or the directory itself."""
    given = pathlib.Path(path).expanduser()
    return given / "checkpoints" if (given / "checkpoints").is_dir() else given


def _rules(config: CheckpointConfig) -> tuple[Rule, ...]:
    if config.initial_mapping is None:
        return ()
    return read_rules(config.initial_mapping, "checkpoint.initial_mapping")


def _manifest(directory: pathlib.Path, config: CheckpointConfig) -> CheckpointManifest:
    """Return the manifest of the step to take."""
    try:
        manager = CheckpointManager(directory, is_writer=False, verify=config.verify)
    except CheckpointError as error:
        raise ValueError(f"checkpoint.initial={config.initial}: {error}") from error
    try:
        step = config.initial_step
        if step is None and (step := manager.newest_whole_step()) is None:
            raise ValueError(
                f"checkpoint.initial={config.initial} holds no checkpoint that is whole"
            )
        return manager.shared_manifest(step)
    finally:
        manager.close()


def _message(
    directory: pathlib.Path, manifest: CheckpointManifest, taken: set[str], has_router: bool
) -> str:
    optimizer = manifest.config.get("optimizer", {})
    name = optimizer.get(TAG, "unknown") if isinstance(optimizer, dict) else "unknown"
    left = sum(path.startswith("opt_state/") for path in manifest.arrays)
    router = ""
    if has_router:
        router = " and router state" if "router_state" in taken else ""
    behind = f"optimizer state ({name}: {left} arrays)" if left else "no optimizer state"
    if has_router and not router:
        behind += " and router state, which is another here,"
    return (
        f"initial  parameters{router} from {directory} step {manifest.step}; {behind} left behind"
    )
