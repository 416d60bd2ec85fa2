# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Extends a run with changed fields, and records how it was extended, branched or initialised.

    lineage.json:
    [{"event": "branched", "source": "runs/a", "step": 300,
      "changes": ["training.steps: 400 -> 900"], "time": "2026-03-01T12:00:00+00:00"},
     {"event": "extended", "step": 900, ...}]

Only fields after which parameters, optimiser state and data position keep their meaning may change
(`EXTENSION_FIELDS`); the schedule is a function of the optimiser's updates, which the checkpoint
has counted: the steps but those that were refused.

`check_config` compares a start with `config.json`, and both agree where a digit of the file has
changed. The checkpoint says with which config it was trained; a difference is allowed only where it
was asked for: on the command line of this start, or of an earlier one, which `lineage.json` records
as extended.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.catalog.run_parts import FILES
from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.configs import differences, from_json, to_json, varying_fields
from jaxmoe.messages import command_line, say
from jaxmoe.run.config import EXTENSION_FIELDS, FIXED_FIELDS, FREE_FIELDS, PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.plan import RunPlan, make_plan
from jaxmoe.tracking.jsonl import read_last_metrics
from jaxmoe.tracking.tracker import REFUSED_STEPS
from sharding.distributed import on_first, share

_REASONS = {
    "model": "the parameters belong to this model",
    "parameterization": "initial values and multipliers belong to it",
    "base": "initial values and multipliers belong to it",
    "data": "the data position counts rows of the saved data",
    "training.seed": "the order of the data belongs to it",
    "training.batch_size": "the data position counts rows of this size",
    "training.batch_ramp": "the data position counts rows of these sizes",
    "training.sequence_length": "the data position counts rows of this length",
    "training.objective": "the losses before and after would not compare",
    "training.skipping": "the losses before and after would not compare",
    "optimizer": "the optimiser's state belongs to it",
    "execution.precision.matmul": "the products round to other values",
}
"""Reasons for which fields may not change, by prefix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """A run that was extended, or that began from another."""

    event: str
    """extended, branched (whole state of another run) or initialised (its parameters)."""
    step: int
    """Number of steps done before."""
    source: str | None = None
    """Run directory that the state is from; None for the run itself."""
    changes: tuple[str, ...] = ()
    """Changed fields with both values."""
    time: str = dataclasses.field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )

    def __str__(self) -> str:
        where = f"from {self.source} at step" if self.source else "at step"
        changed = f": {', '.join(self.changes)}" if self.changes else ""
        return f"{self.event} {where} {self.step}{changed}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineageSource:
    """Checkpoint of another run, from which a run begins."""

    path: str
    """Run directory, or directory of checkpoints."""
    step: int
    config: Mapping[str, Any]
    """Config of the checkpoint, as JSON."""


def read_lineage(directory: RunDirectory) -> tuple[Event, ...]:
    """Return the events of a run, the oldest first.

    Args:
        directory: Run directory.

    Raises:
        ValueError: The file is damaged.
    """
    events = directory.lineage()
    if not all(map(_is_event, events)):
        raise ValueError(f"{directory.lineage_file} is damaged: restore or remove it")
    return tuple(Event(**{**event, "changes": tuple(event["changes"])}) for event in events)


def shared_lineage(directory: RunDirectory) -> tuple[Event, ...]:
    """Return the events of a run, none on all processes but the first; each must call this.

    Args:
        directory: Run directory; the first process reads it.

    Raises:
        ValueError: The file is damaged; raised on all processes.
    """
    failure = f"{directory.lineage_file} is damaged, as the first process saw"
    return on_first(lambda: read_lineage(directory), failure) or ()


def _is_event(value: Any) -> bool:
    """Return whether a value has the names and types of an `Event`."""
    names = {field.name for field in dataclasses.fields(Event)}
    return (
        isinstance(value, dict)
        and value.keys() == names
        and type(value["step"]) is int
        and all(type(value[name]) is str for name in ("event", "time"))
        and isinstance(value["source"], str | None)
        and isinstance(value["changes"], list)
        and all(type(change) is str for change in value["changes"])
    )


def add_event(directory: RunDirectory, event: Event) -> None:
    """Record an event, unless the last one is the same.

    Args:
        directory: Run directory.
        event: Event to append.

    Raises:
        ValueError: The file cannot be written.
    """
    events = read_lineage(directory)
    if not events or str(events[-1]) != str(event):
        directory.write_lineage([dataclasses.asdict(each) for each in (*events, event)])


def check_config(
    directory: RunDirectory, config: PretrainConfig, plan: RunPlan, *, extends: bool
) -> Callable[[], None]:
    """Refuse changes of an old run, and write nothing; return the function that records the config.

    It is called once nothing can refuse the start any more: a refused one leaves the run as it is.

    Args:
        directory: Run directory, held by this process.
        config: Config of this start.
        plan: Its plan.
        extends: Whether `EXTENSION_FIELDS` may change.

    Raises:
        ValueError: A field has changed that may not; the message has one line per field.
    """
    way_out = f", and begin there with --checkpoint.initial.path {directory.path}"
    saved = directory.config_json() if directory.has_config() else to_json(config)
    changes = differences(saved, config, FREE_FIELDS, FIXED_FIELDS)
    refused = differences(saved, config, (*FREE_FIELDS, *EXTENSION_FIELDS), FIXED_FIELDS)
    if changes and not refused and not extends:
        resume = command_line("pretrain", "resume", directory.path)
        way_out += f", or extend the run: {resume} {_flags(saved, config)}"
    if not (extends and changes):
        directory.check_config(config, FREE_FIELDS, FIXED_FIELDS, way_out, writes=False)
        return functools.partial(directory.check_config, config, FREE_FIELDS, FIXED_FIELDS, way_out)
    if refused:
        raise ValueError(f"run.directory={directory.path} {_refusal(refused)}{way_out}")
    step = _newest_step(directory)
    if config.training.steps < step:
        raise ValueError(
            f"training.steps={config.training.steps} must be at least {step}, the step that the run"
            " has done: branch from an earlier checkpoint with"
            f" {command_line('pretrain', 'branch', directory.path)}"
            " --checkpoint.initial.step STEP --run.name NAME"
        )

    def record() -> None:
        if step:
            _show_rates(directory, make_plan(from_json(PretrainConfig, saved)), plan, step)
        add_event(directory, Event(event="extended", step=step, changes=_changes(saved, config)))
        directory.check_config(config, (*FREE_FIELDS, *EXTENSION_FIELDS), FIXED_FIELDS)

    return record


def record_source(directory: RunDirectory, source: LineageSource, config: PretrainConfig) -> None:
    """Record which run a new run begins from; a branch gets the metrics up to its step.

    Args:
        directory: Run directory, held by this process.
        source: Checkpoint from which the run begins.
        config: Config of the run.

    Raises:
        ValueError: A file cannot be read or written.
    """
    initial = config.checkpoint.initial
    is_branch = initial is not None and initial.state == "all"
    parent = RunDirectory(source.path)
    if is_branch and parent.has_config():
        _copy_records(parent, directory, source.step)
    event = Event(
        event="branched" if is_branch else "initialised",
        step=source.step,
        source=source.path,
        changes=_changes(source.config, config) if is_branch else (),
    )
    add_event(directory, event)


def check_branch(saved: Mapping[str, Any], config: PretrainConfig) -> None:
    """Refuse to continue the state of another config.

    Args:
        saved: Config of the checkpoint, as JSON.
        config: Config of the new run, with the model of its plan.

    Raises:
        ValueError: A field differs that belongs to the state; the message has one line per field.
    """
    free = (*FREE_FIELDS, *EXTENSION_FIELDS)
    if refused := differences(saved, config, free, FIXED_FIELDS):
        raise ValueError(
            f"checkpoint.initial.path={config.checkpoint.initial_path} {_refusal(refused)}; or take"
            " its parameters only, with --checkpoint.initial.state parameters"
        )


def _changes(saved: Mapping[str, Any], config: PretrainConfig) -> tuple[str, ...]:
    """Return the changed fields with both values as text."""
    return tuple(f"{path}: {old} -> {new}" for path, old, new in _change(saved, config))


def _newest_step(directory: RunDirectory) -> int:
    """Return the step of the newest checkpoint, without reading it; 0 without one."""
    return max(_steps(directory), default=0)


def _copy_records(source: RunDirectory, directory: RunDirectory, step: int) -> None:
    """Copy the records of a run to a branch of it, unless the branch has its own.

    Args:
        source: Run directory that the state is from.
        directory: Run directory of the branch.
        step: Step of the branch. Later records are dropped when the branch opens its files.
    """
    files = (RunDirectory.metrics_file, RunDirectory.router_file, *FILES)
    with directory.usable():
        for before, after in ((source.path / f, directory.path / f) for f in files):
            if before.exists() and not after.exists():
                shutil.copyfile(before, after)
    if not read_lineage(directory):
        earlier = [event for event in read_lineage(source) if event.step <= step]
        names = (
            dataclasses.replace(event, source=event.source or str(source.path)) for event in earlier
        )
        directory.write_lineage([dataclasses.asdict(event) for event in names])


def _steps(directory: RunDirectory) -> list[int]:
    """Return the steps of the checkpoints, in any order."""
    place = directory.checkpoints_directory
    names = [path.name for path in place.iterdir()] if place.is_dir() else []
    return [int(name) for name in names if name.isdecimal()]


def _change(saved: Mapping[str, Any], config: PretrainConfig) -> list[tuple[str, str, str]]:
    """Return path, old and new value of the changed fields that a run records."""
    lines = differences(saved, config, FREE_FIELDS)
    paths = {line.partition(":")[0] for line in lines}
    fields = varying_fields([saved, config])
    return [(path, fields[path][0], fields[path][1]) for path in sorted(paths)]


def _flags(saved: Mapping[str, Any], config: PretrainConfig) -> str:
    """Return the changes as flags."""
    return " ".join(
        f"{path}:{new}" if path == "schedule" else f"--{path} {'None' if new == 'null' else new}"
        for path, _, new in _change(saved, config)
    )


def _refusal(lines: list[str]) -> str:
    """Return why a run cannot go on with changed fields, one line per field."""

    def reason(line: str) -> str:
        path = line.partition(":")[0]
        prefixes = [p for p in _REASONS if path == p or path.startswith(f"{p}.")]
        return f" ({_REASONS[max(prefixes, key=len)]})" if prefixes else ""

    shown = "\n  ".join(line + reason(line) for line in lines)
    return (
        f"cannot be continued with these changes:\n  {shown}\n"
        f"only {', '.join(EXTENSION_FIELDS)} may change; repeat the other saved values, or choose"
        " another directory with --run.directory"
    )


def _show_rates(directory: RunDirectory, before: RunPlan, after: RunPlan, step: int) -> None:
    """Log the learning rate before and after; if it rises again, with the way to avoid that."""
    metrics = read_last_metrics(path) if (path := directory.metrics_file).exists() else {}
    updates = step - int(metrics.get(REFUSED_STEPS, 0.0))
    old = before.matrix_rate * float(before.schedule(jnp.asarray(updates - 1)))
    new = after.matrix_rate * float(after.schedule(jnp.asarray(updates)))
    say(f"rate     {old:.3g} at step {step}, {new:.3g} at step {step + 1}")
    factors = np.asarray(jax.vmap(before.schedule)(jnp.arange(step)))
    peak = float(factors.max())
    if new <= 1.01 * old or before.matrix_rate * peak <= 1.01 * old:
        return
    earlier = [s for s in _steps(directory) if s <= step and factors[s - 1] >= 0.99 * peak]
    way_out = "no checkpoint from before that is left"
    if earlier:
        way_out = (
            f"to continue from before that: {command_line('pretrain', 'branch', directory.path)}"
            f" --checkpoint.initial.step {max(earlier)} --run.name NAME"
        )
    say(f"note     the learning rate had begun to fall, and rises again; {way_out}")


class Change(NamedTuple):
    """A change of a config that was asked for."""

    path: str
    """Dotted path of the field; the fields below it are meant too."""
    value: str | None
    """New value as text; None for any."""
    last_step: int | None
    """Newest step of the checkpoints that the change came after; None for all."""

    def explains(self, path: str, value: str, step: int) -> bool:
        """Return whether the change is why a checkpoint differs.

        Args:
            path: Field that differs.
            value: Its value now.
            step: Step of the checkpoint.
        """
        is_field = path == self.path or path.startswith(f"{self.path}.")
        is_later = self.last_step is None or step <= self.last_step
        return is_field and is_later and self.value in (None, value)


def config_check(
    directory: RunDirectory, config: PretrainConfig, extends: bool | frozenset[str]
) -> Callable[[CheckpointManifest], None]:
    """Return a function that refuses checkpoints of another config; every process must call this.

    Args:
        directory: Run directory; the first process reads it, before the config is recorded.
        config: Config of this start, with the model of its plan.
        extends: Whether the run may be extended; or the fields that the command line names.

    Raises:
        ValueError: A file is damaged.
    """
    failure = f"{directory.path} is damaged, as the first process saw"
    changes = on_first(lambda: _refused_changes(directory, config, extends), failure) or []
    text = np.frombuffer(json.dumps(changes).encode(), np.uint8)
    text = share(text, jax.process_index() == 0).tobytes().decode()
    changes = [Change(*change) for change in json.loads(text)]

    def check(manifest: CheckpointManifest) -> None:
        _check(directory, manifest, config, changes)

    return check


def _refused_changes(
    directory: RunDirectory, config: PretrainConfig, extends: bool | frozenset[str]
) -> list[Change]:
    """Return what this start and the earlier ones have changed."""
    changes = [
        Change(path, value, event.step)
        for event in read_lineage(directory)
        if event.event == "extended"
        for path, _, change in (text.partition(": ") for text in event.changes)
        for value in (change.rpartition(" -> ")[2],)
    ]
    if extends is False:
        return changes
    if isinstance(extends, frozenset):
        changes += [Change(path, None, None) for path in sorted(extends)]
    if directory.has_config():
        differing = varying_fields([directory.config_json(), config])
        changes += [Change(path, values[1], None) for path, values in differing.items()]
    return [change for change in changes if _may_change(change.path)]


def _may_change(path: str) -> bool:
    return any(path == field or path.startswith(f"{field}.") for field in EXTENSION_FIELDS)


def _check(
    directory: RunDirectory,
    manifest: CheckpointManifest,
    config: PretrainConfig,
    changes: list[Change],
) -> None:
    if not manifest.config:
        return
    lines = differences(manifest.config, config, FREE_FIELDS, FIXED_FIELDS)
    differing: dict[str, Any] = varying_fields([manifest.config, config])
    refused = [
        path
        for path in (line.partition(":")[0] for line in lines)
        if not any(change.explains(path, differing[path][1], manifest.step) for change in changes)
    ]
    if not refused:
        return
    shown = "\n  ".join(
        f"{path}: {differing[path][0]} in the checkpoint, {differing[path][1]} in config.json"
        for path in refused
    )
    way_out = f"write the values of the checkpoint into {directory.config_file}"
    if all(map(_may_change, refused)):
        flags = " ".join(
            f"{path}:{differing[path][0]}"
            if path == "schedule"
            else f"--{path} {differing[path][0]}"
            for path in refused
        )
        resume = command_line("pretrain", "resume", directory.path)
        way_out += f", or say which ones shall hold: {resume} {flags}"
    raise ValueError(
        f"{directory.config_file} is not the config with which step {manifest.step} was trained:\n"
        f"  {shown}\n{way_out}"
    )
