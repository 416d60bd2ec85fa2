# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts a new run from the parameters, or from the whole state, of another.

    jaxmoe pretrain --run.name second --checkpoint.initial.path runs/pretrain/tiny
    jaxmoe pretrain branch runs/pretrain/tiny --run.name longer --training.steps 900

The first takes the parameters, by name or by a mapping, from any mesh, and the router state if all
of it has the same shapes. Optimiser state, step and data position start anew; a message lists what
was left behind. The second (`checkpoint.initial.state=all`) takes all arrays, the step and the data
position.

With an adapter `checkpoint.initial` is the model that the run adapts. Checkpoints of the run leave
its parameters out: see `jaxmoe.checkpoint.base_model`.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.adapters import is_factor, plain, with_base
from jaxmoe.checkpoint import CheckpointError, CheckpointManager
from jaxmoe.checkpoint.base_model import BaseModel, fingerprint_of
from jaxmoe.checkpoint.huggingface.hub import is_huggingface
from jaxmoe.checkpoint.manifest import CheckpointManifest, describe
from jaxmoe.checkpoint.mapping import MappingRule, plan_mapping, read_rules
from jaxmoe.checkpoint.restore import restore_part
from jaxmoe.configs import TAG
from jaxmoe.fingerprints import fingerprints
from jaxmoe.messages import command_line, say
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import CheckpointConfig, InitialConfig, PretrainConfig
from jaxmoe.run.provenance.lineage import LineageSource, check_branch
from jaxmoe.run.provenance.saved import huggingface_values
from jaxmoe.training.state import TrainState, state_around


def with_initial_step(config: PretrainConfig, saved: Mapping[str, Any] | None) -> PretrainConfig:
    """Return a config that names the step of the other run with which this run begins.

    A run keeps it: when it goes on or is opened, the other may have trained on.

    Args:
        config: Configuration of the run.
        saved: `config.json` of a run that goes on; None for a new one.

    Raises:
        ValueError: The other run has no checkpoint.
    """
    initial = config.checkpoint.initial
    if initial is None or initial.step is not None or is_huggingface(initial.path):
        return config
    if saved is None:
        step = initial_manifest(config.checkpoint).step
    else:
        step = ((saved.get("checkpoint") or {}).get("initial") or {}).get("step")
    initial = dataclasses.replace(initial, step=step)
    checkpoint = dataclasses.replace(config.checkpoint, initial=initial)
    return dataclasses.replace(config, checkpoint=checkpoint)


def base_of(assembly: Assembly) -> BaseModel | None:
    """Return the model that a run adapts; None for a run whose checkpoints hold all parameters.

    Args:
        assembly: Plan, devices and data of the run, whose model has an adapter.

    Raises:
        ValueError: `checkpoint.initial` is missing, or holds no model.
    """
    plan = assembly.plan
    config = plan.config.checkpoint
    assert plan.model.adapter is not None  # by the caller
    left_out = frozenset(
        row.path for row in plan.table if row.is_frozen and not is_factor(row.path)
    )
    if not left_out:
        return None
    initial = config.initial
    if initial is None:
        raise ValueError(
            f"model.adapter={plan.model.adapter.name} trains a part of a model that is there: name"
            " it with --checkpoint.initial.path, a run directory or one of a Hugging Face model"
        )
    if plan.model.adapter.moves_base:
        return None
    if not is_huggingface(initial.path):
        first = initial_manifest(config)
        config = config if first.base is None else adapted_by(config, first)
        initial = _initial(config)
    if is_huggingface(initial.path):
        read = functools.partial(_read_huggingface, assembly, initial.path)
        full = {row.path: None for row in plan.table if row.path in left_out}
        prints = fingerprints(traverse_util.unflatten_dict(read(full), sep="/"))
        step = 0
    else:
        manifest = initial_manifest(config)
        step = manifest.step
        prints = _of_params(manifest.fingerprints, left_out)
        read = functools.partial(
            _read_run, initial_directory(config), manifest.step, config.safeguards.verify
        )
    return BaseModel(
        path=initial.path,
        step=step,
        fingerprint=fingerprint_of(prints),
        left_out=left_out,
        load=read,
    )


def _of_params(prints: Mapping[str, str], paths: frozenset[str]) -> dict[str, str]:
    """Return the fingerprints of parameters, by their paths; of all parts of quantised ones."""
    arrays = {path.removeprefix("params/"): value for path, value in prints.items()}
    return {
        path: value
        for path, value in arrays.items()
        if path in paths or path.rpartition("/")[0] in paths
    }


def _read_run(
    directory: pathlib.Path, step: int, verify: Any, target: dict[str, Any]
) -> dict[str, Any]:
    nested = {"params": traverse_util.unflatten_dict(target, sep="/")}
    arrays = restore_part(directory, nested, step=step, verify=verify)["params"]
    return traverse_util.flatten_dict(arrays, sep="/")


def _read_huggingface(assembly: Assembly, path: str, target: dict[str, Any]) -> dict[str, Any]:
    predictor = assembly.plan.model.extras.predictor
    params, _ = huggingface_values(path, assembly.execution, assembly.mesh, predictor)
    flat = traverse_util.flatten_dict(params, sep="/")
    return {name: flat[name] for name in target}


def branched_state(
    assembly: Assembly, target: Any, check: Callable[[CheckpointManifest], None]
) -> tuple[LineageSource, TrainState]:
    """Return the state of a checkpoint of `checkpoint.initial`, which a branch continues.

    Args:
        assembly: Plan, devices and data of the new run.
        target: State, or its shapes and shardings.
        check: Function that raises for the manifest of a checkpoint with other data.

    Raises:
        ValueError: There is no such checkpoint, or it belongs to another model, optimiser or data.
    """
    plan = assembly.plan
    config = plan.config.checkpoint
    training = plan.config.training
    directory = initial_directory(config)
    manifest = initial_manifest(config)
    # As checkpoints hold it: with the forward multipliers in the model.
    check_branch(manifest.config, dataclasses.replace(plan.config, model=plan.model))
    if manifest.step >= training.steps:
        raise ValueError(
            f"training.steps={training.steps} must be at least {manifest.step + 1}, for"
            f" checkpoint.initial.path={config.initial_path} has done step {manifest.step}: give"
            " more steps, or an earlier checkpoint.initial.step"
        )
    check(manifest)
    manager = CheckpointManager(directory, is_writer=False, verify=config.safeguards.verify)
    try:
        state = manager.restore(manifest.step, target)
    finally:
        manager.close()
    return _source(config, manifest), state


def initial_state(assembly: Assembly, state: TrainState) -> tuple[LineageSource, TrainState]:
    """Return the state of a new run with the parameters of `checkpoint.initial`.

    Args:
        assembly: Plan, devices and data of the run.
        state: State before the first step.

    Raises:
        ValueError: There is no such checkpoint, the mapping does not fit, or arrays are missing or
            have another shape or dtype; lists all of them.
    """
    config = assembly.plan.config.checkpoint
    if is_huggingface(_initial(config).path):
        return _of_huggingface(assembly, state)
    directory = initial_directory(config)
    rules = _rules(config)
    manifest = initial_manifest(config)
    if manifest.base is not None:
        return _of_adapter(assembly, state, manifest)
    names = plan_mapping(rules, manifest.arrays) if rules else manifest.arrays
    target = {"params": plain(state.params)}
    router_arrays = describe({"router_state": state.router_state}) if state.router_state else {}
    router_paths = {path for path in names if path.startswith("router_state/")}
    is_router_taken = bool(router_arrays) and all(
        path in manifest.arrays and manifest.arrays[path] == array
        for path, array in router_arrays.items()
    )
    if is_router_taken and router_paths == router_arrays.keys():
        target["router_state"] = state.router_state
    restored = restore_part(
        directory, target, step=manifest.step, mapping=rules, verify=config.safeguards.verify
    )
    started = _begin(assembly, state, restored["params"], restored.get("router_state"))
    say(_message(directory, manifest, set(target), bool(router_arrays) or bool(router_paths)))
    params = {path for path in names if path.startswith("params/")}
    if unread := sorted(params - describe({"params": target["params"]}).keys()):
        more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
        say(
            f"note: the model has no {', '.join(unread[:5])}{more}, which are left behind: it"
            f" computes another function than that of {directory}"
        )
    return _source(config, manifest), started


def adapted_by(config: CheckpointConfig, manifest: CheckpointManifest) -> CheckpointConfig:
    """Return where the model is that the adapter of a checkpoint was trained on.

    Args:
        config: Place of the checkpoint.
        manifest: Manifest of the checkpoint, which names the model.
    """
    assert manifest.base is not None  # of an adapter
    path = manifest.base["path"]
    step = None if is_huggingface(path) else manifest.base["step"]
    initial = dataclasses.replace(_initial(config), path=path, step=step)
    return dataclasses.replace(config, initial=initial)


def _of_adapter(
    assembly: Assembly, state: TrainState, manifest: CheckpointManifest
) -> tuple[LineageSource, TrainState]:
    """Return the state of a new run with the adapter of another, and the model that it adapts.

    Args:
        assembly: Plan, devices and data of the run.
        state: State before the first step.
        manifest: Manifest of the checkpoint of the other run.

    Raises:
        ValueError: The adapter has other parameters.
    """
    plan = assembly.plan
    config = plan.config.checkpoint
    flat: dict[str, Any] = traverse_util.flatten_dict(state.params, sep="/")
    # Scales are numbers of the config, such as alpha.
    factors = {p: leaf for p, leaf in flat.items() if is_factor(p) and not p.endswith(":scale")}
    params = (path.partition("params/") for path in manifest.arrays)
    saved_paths = {
        path for before, restored, path in params if restored and not before and is_factor(path)
    }
    missing = {path for path in saved_paths - factors.keys() if path.endswith((":down", ":downs"))}
    if differing := sorted((factors.keys() - saved_paths) | missing):
        raise ValueError(
            f"checkpoint.initial.path={config.initial_path} holds another adapter than"
            f" model.adapter, which differ in {differing[0]}: repeat its fields, or fold it"
            " first, jaxmoe checkpoint convert --fold True"
        )
    target = {"params": traverse_util.unflatten_dict(factors, sep="/")}
    restored = restore_part(
        initial_directory(config), target, step=manifest.step, verify=config.safeguards.verify
    )
    factors = traverse_util.flatten_dict(restored["params"], sep="/")
    state = dataclasses.replace(state, params=traverse_util.unflatten_dict(flat | factors, sep="/"))
    say(f"initial  adapter from {config.initial_path} step {manifest.step}")
    based = dataclasses.replace(plan.config, checkpoint=adapted_by(config, manifest))
    at_base = dataclasses.replace(assembly, plan=dataclasses.replace(plan, config=based))
    _, started = initial_state(at_base, state)
    return _source(config, manifest), started


def _of_huggingface(assembly: Assembly, state: TrainState) -> tuple[LineageSource, TrainState]:
    """Return the state of a new run with the parameters of a Hugging Face model.

    Raises:
        ValueError: The model is another, or a step or a mapping is given.
    """
    initial = _initial(assembly.plan.config.checkpoint)
    path = initial.path
    for field in ("step", "mapping"):
        if (value := getattr(initial, field)) is not None:
            raise ValueError(
                f"checkpoint.initial.{field}={value}: {path} holds a Hugging Face model, which"
                " has neither steps nor other names: leave it out"
            )
    params, router_state = huggingface_values(path, assembly.execution, assembly.mesh)
    file_shapes = describe({"params": params})
    model_shapes = describe({"params": plain(state.params)})
    if file_shapes != model_shapes:
        differing = sorted(
            p for p in file_shapes | model_shapes if file_shapes.get(p) != model_shapes.get(p)
        )
        raise ValueError(
            f"checkpoint.initial.path={path} holds another model than model:"
            f" {', '.join(differing[:5])} and {max(len(differing) - 5, 0)} more differ: take"
            f" its own with {command_line('finetune', path)}"
        )
    replicated = NamedSharding(assembly.mesh, PartitionSpec())
    router_state = jax.device_put(router_state, replicated) if router_state else None
    started = _begin(assembly, state, params, router_state)
    say(f"initial  parameters from {path}, a Hugging Face model")
    return LineageSource(path=path, step=0, config={}), started


def _begin(assembly: Assembly, state: TrainState, params: Any, router_state: Any) -> TrainState:
    """Return the state before the first step with other parameters and router state.

    Args:
        assembly: Plan, devices and data of the run.
        state: State before the first step, with the factors of an adapter.
        params: Parameters of the model.
        router_state: Router state; a new one when None.
    """
    plan = assembly.plan
    key = jax.random.key(assembly.plan.config.training.seed)

    def around(params):
        config = plan.config
        options = {"gradients": config.training.gradients, "parts": config.step_parts}
        where = (plan.model, plan.optimizer, assembly.execution)
        return state_around(*where, params, key, **options)

    with jax.set_mesh(assembly.mesh):
        started = jax.jit(around)(with_base(state.params, params))
    if router_state is not None:
        started = started.replace(router_state=router_state)
    return assembly.workers.begin(started)


def _source(config: CheckpointConfig, manifest: CheckpointManifest) -> LineageSource:
    return LineageSource(path=_initial(config).path, step=manifest.step, config=manifest.config)


def _initial(config: CheckpointConfig) -> InitialConfig:
    """Return the run or model from which a run begins, which has one."""
    assert config.initial is not None  # by the caller
    return config.initial


def initial_directory(config: CheckpointConfig) -> pathlib.Path:
    """Return the directory of checkpoints of `checkpoint.initial`, or the directory itself."""
    path = pathlib.Path(_initial(config).path).expanduser()
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _rules(config: CheckpointConfig) -> tuple[MappingRule, ...]:
    mapping = _initial(config).mapping
    if mapping is None:
        return ()
    return read_rules(mapping, "checkpoint.initial.mapping")


def initial_manifest(config: CheckpointConfig) -> CheckpointManifest:
    """Return the manifest of the step of `checkpoint.initial` to take.

    Raises:
        ValueError: It holds no checkpoint.
    """
    try:
        directory = initial_directory(config)
        manager = CheckpointManager(directory, is_writer=False, verify=config.safeguards.verify)
    except CheckpointError as error:
        raise ValueError(f"checkpoint.initial.path={config.initial_path}: {error}") from error
    try:
        step = _initial(config).step
        if step is None and (step := manager.newest_whole_step()) is None:
            raise ValueError(
                f"checkpoint.initial.path={config.initial_path} holds no checkpoint that is whole"
            )
        return manager.shared_manifest(step)
    finally:
        manager.close()


def _message(
    directory: pathlib.Path, manifest: CheckpointManifest, fields: set[str], has_router: bool
) -> str:
    optimizer = manifest.config.get("optimizer", {})
    name = optimizer.get(TAG, "unknown") if isinstance(optimizer, dict) else "unknown"
    num_left = sum(path.startswith("opt_state/") for path in manifest.arrays)
    router = ""
    if has_router:
        router = " and router state" if "router_state" in fields else ""
    behind = f"optimizer state ({name}: {num_left} arrays)" if num_left else "no optimizer state"
    if has_router and not router:
        behind += " and router state, which is another here,"
    return (
        f"initial  parameters{router} from {directory} step {manifest.step}; {behind} left behind"
    )
