# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A new run that begins with the parameters of another.

    python -m experiments.pretrain tiny --run.name second --checkpoint.initial runs/pretrain/tiny

What it takes: the parameters, by their names or by a mapping, on whatever mesh they were saved, and
the router's state where all of it is there in the same shapes. What it leaves, and says so: the
optimizer's state, which begins anew from these parameters, the step and the position in the data.

To take more: a branch of `TrainState` in `initial_state`.
"""

from __future__ import annotations

import pathlib

import jax

from jaxmoe.checkpoint import CheckpointError, CheckpointManager
from jaxmoe.checkpoint.manifest import CheckpointManifest, describe
from jaxmoe.checkpoint.mapping import Rule, plan_mapping, read_rules
from jaxmoe.checkpoint.restore import restore_part
from jaxmoe.configs import TAG
from jaxmoe.messages import say
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import CheckpointConfig
from jaxmoe.training.state import TrainState, state_around


def initial_state(assembly: Assembly, state: TrainState) -> TrainState:
    """The state of a new run: as it is, or around the parameters of `checkpoint.initial`.

    Args:
        assembly: of the run.
        state: before its first step.

    Raises:
        ValueError: no checkpoint there, a mapping that does not fit, or arrays that are missing or
            of another shape or dtype, all of them at once.
    """
    config = assembly.plan.config.checkpoint
    if config.initial is None:
        return state
    directory, rules = _directory(config.initial), _rules(config)
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
        return state_around(plan.model, plan.optimizer, execution, params, key)

    with jax.set_mesh(assembly.mesh):
        begun = jax.jit(around)(found["params"])
    begun = begun.replace(router_state=found.get("router_state", begun.router_state))
    say(_told(directory, manifest, set(target), bool(wanted) or bool(here)))
    return begun


def _directory(path: str) -> pathlib.Path:
    """Of the checkpoints: of a run, or the directory itself."""
    given = pathlib.Path(path).expanduser()
    return given / "checkpoints" if (given / "checkpoints").is_dir() else given


def _rules(config: CheckpointConfig) -> tuple[Rule, ...]:
    if config.initial_mapping is None:
        return ()
    return read_rules(config.initial_mapping, "checkpoint.initial_mapping")


def _manifest(directory: pathlib.Path, config: CheckpointConfig) -> CheckpointManifest:
    """Of the step that is taken."""
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


def _told(
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
