# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of whole runs: commands with flags, on eight devices, and the checkpoints they leave."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.hashes.digests import digest_of_record, parts_of_state
from tests.support.hashes.rows import Row

STEPS = 4
QUIET = (
    "--tracking.console",
    "none",
    "--tracking.sample_length",
    "0",
    "--tracking.print_every",
    "1",
    "--evaluation.every",
    "0",
    "--evaluation.batches",
    "1",
)
TWO_LAYERS = ("--model.num_layers", "2")


def rows() -> Iterator[tuple[str, Row]]:
    """Yield the rows."""
    from jaxmoe.optim.schedules import SCHEDULES
    from jaxmoe.scaling import PARAMETERIZATIONS
    from jaxmoe.training.replicas import REPLICAS

    for name in PARAMETERIZATIONS:
        yield f"parameterization/{name}", _of_flags(*_parameterization(name))
    yield "optimizer/mkor", _of_flags("optimizer:mkor", "--optimizer.interval", "2")
    for name in SCHEDULES:
        yield f"schedule/{name}", _of_flags(f"schedule:{name}", "--schedule.warmup_steps", "1")
    for name in REPLICAS:
        yield f"replicas/{name}", _of_flags(*_replicas(name))
    for name, flags in _FLAGS.items():
        yield f"run/{name}", _of_flags(*flags)
    yield from {
        "run/resumed": _resumed,
        "run/extended": _extended,
        "run/branched": _branched,
        "run/on_another_mesh": _moved,
        "run/rolled_back": _rolled_back,
        "run/finetuned": _finetuned,
        "run/reinforced": _reinforced,
        "run/generated": _generated,
    }.items()


def train(directory: pathlib.Path, *flags: str, steps: int = STEPS) -> None:
    """Train a run with the command, on all devices."""
    from experiments import pretrain
    from tests.support.runs import flags as flags_of

    code = pretrain.main(flags_of(directory, steps, *QUIET, *flags))
    if code != 0:
        raise RuntimeError(f"pretrain ended with exit code {code}")


def parts_of_run(directory: pathlib.Path) -> dict[str, str]:
    """Return the hashes of what a run leaves: logged losses, held-out loss and last state."""
    from jaxmoe import load_checkpoint

    lines = (directory / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    losses = [_losses(line) for line in logged]
    summary = json.loads((directory / "summary.json").read_text())
    held_out = {name: summary.get(name) for name in ("final_loss", "eval_bits_per_token")}
    parts = {
        "loss": digest_of_record([line for line in losses if len(line) > 1]),
        "held-out loss": digest_of_record(held_out),
    }
    return parts | parts_of_state(load_checkpoint(directory / "checkpoints"))


def _losses(line: dict[str, Any]) -> dict[str, Any]:
    """Return the losses of a line of metrics, which has seconds and rates as well."""
    names = ("step", "train/loss", "train/grad_norm", "train/learning_rate", "eval/bits_per_token")
    own = [name for name in line if name in names or name.startswith("loss/")]
    return {name: line[name] for name in own}


def _of_flags(*flags: str) -> Row:
    return functools.partial(_run, flags)


def _run(flags: Sequence[str], directory: pathlib.Path) -> dict[str, str]:
    train(directory / "run", *flags)
    return parts_of_run(directory / "run")


def _parameterization(name: str) -> tuple[str, ...]:
    """The parameterisation, with the optimiser of its matrices, on a model beyond its base."""
    optimizer = "muonh" if name in ("hyperp", "muonh_vanilla") else "adamw"
    optimizer = "muon" if name.endswith("_muon") else optimizer
    base = ("--base.embed_dim", "8", "--base.num_layers", "1", "--base.batch_tokens", "64")
    return (f"optimizer:{optimizer}", f"parameterization:{name}", *TWO_LAYERS, *base)


def _replicas(name: str) -> tuple[str, ...]:
    """The method with four workers, on two devices each, that exchange every other step."""
    from jaxmoe.training.replicas import REPLICAS

    small = {"every": 2, "fragments": 2, "kept": 16, "merging_every": 2, "tile": 16, "nearest": 1}
    if name == "heterogeneous":
        small["slow"] = 1
    fields = {field: value for field, value in small.items() if _has(REPLICAS[name], field)}
    flags = [word for field in fields for word in (f"--replicas.{field}", str(fields[field]))]
    mesh = ("--execution.mesh.replica", "4", "--execution.mesh.data", "2")
    if name in _TOGETHER:
        mesh = ("--replicas.workers", "4")
    # A delayed merge cannot be traced where an axis of heads has the size 1.
    heads = ("--model.attention.num_heads", "2", "--model.attention.num_kv_heads", "2")
    rows = ("--training.batch_size", "32")
    return (f"replicas:{name}", *flags, *mesh, *rows, *heads, *TWO_LAYERS)


_TOGETHER = ("noloco", "a2cid2")
"""Methods whose workers train on the same devices here: on devices of their own they permute in the
branches of a conditional, which aborts in XLA for the CPU when two executions meet."""


def _has(config: Any, field: str) -> bool:
    return field in config.__dataclass_fields__


_MESH = ("--execution.mesh.data", "4", "--execution.mesh.expert", "2")
_FLAGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "on_a_mesh": _MESH,
    "workers_on_the_same_devices": (
        "replicas:diloco",
        "--replicas.workers",
        "2",
        "--replicas.every",
        "2",
        "--training.batch_size",
        "16",
    ),
    "accumulated": ("--training.accumulation", "2", "--training.batch_size", "16"),
    "batch_ramp": (
        "--training.batch_ramp.fraction",
        "0.5",
        "--training.batch_ramp.stages",
        "1",
        "--training.batch_size",
        "16",
    ),
    "average_fixed": ("training.average:fixed",),
    "average_balanced": ("training.average:balanced",),
    "spsa": ("training.gradients:spsa",),
    "seed_pool": ("training.gradients:seed_pool", "--training.gradients.seeds", "16"),
    "evolution": ("training.gradients:evolution", "--training.clip", "None"),
    "snapshots": ("--snapshots.every", "2"),
    "optimizer_in_files": (
        "--execution.offload.optimizer",
        "files",
        "--execution.offload.parts",
        "2",
        *TWO_LAYERS,
    ),
    "recomputed": ("--recomputation.every", "2"),
    "blocking_saves": ("--checkpoint.capture", "blocking", "--checkpoint.every", "2"),
    "layer_norms": ("--parts", "check_free"),
    "watched_gradients": ("--gradient_comparison.every", "2"),
    "detailed_telemetry": ("--execution.telemetry", "detailed"),
    "pipeline": (
        "--execution.mesh.stage",
        "2",
        "--execution.mesh.data",
        "4",
        "--training.accumulation",
        "2",
        "--training.batch_size",
        "16",
        *TWO_LAYERS,
    ),
}


def _resumed(directory: pathlib.Path) -> dict[str, str]:
    """Two steps, then two more in the same directory, against four: both are hashed."""
    whole, parts = directory / "whole", directory / "parts"
    train(whole)
    _train_and_leave(parts, step=2)
    train(parts)
    found, wanted = parts_of_run(parts), parts_of_run(whole)
    if found != wanted:
        names = [name for name in wanted if found[name] != wanted[name]]
        raise AssertionError(f"a resumed run differs from a whole one in {', '.join(names)}")
    return found


def _train_and_leave(directory: pathlib.Path, step: int, *flags: str) -> None:
    """Train a run of four steps until one of them, and save."""
    from experiments.cli.flags import parse
    from experiments.recipes import DEFAULT, RECIPES
    from jaxmoe.run import Run
    from tests.support.runs import flags as flags_of

    words = flags_of(directory, STEPS, *QUIET, *flags)
    name, config = parse(RECIPES, DEFAULT, words, "hashes", "")
    for trained in Run(config, name=name).steps():
        if trained.step == step:
            break


def _extended(directory: pathlib.Path) -> dict[str, str]:
    from experiments import pretrain

    train(directory / "run", steps=3)
    more = ["--training.steps", "5", "--optimizer.learning_rate", "0.003"]
    _check(pretrain.main(["resume", str(directory / "run"), *more]))
    return parts_of_run(directory / "run")


def _branched(directory: pathlib.Path) -> dict[str, str]:
    from experiments import pretrain

    train(directory / "run", "--checkpoint.every", "2")
    where = ["--run.directory", str(directory / "branch"), "--checkpoint.initial.step", "2"]
    _check(pretrain.main(["branch", str(directory / "run"), *where, "--training.steps", "3"]))
    return parts_of_run(directory / "branch")


def _moved(directory: pathlib.Path) -> dict[str, str]:
    """Two steps on one mesh, two on another."""
    _train_and_leave(directory / "run", 2)
    train(directory / "run", *_MESH)
    return parts_of_run(directory / "run")


def _rolled_back(directory: pathlib.Path) -> dict[str, str]:
    """Two steps are refused, and the run goes back to a checkpoint and skips their rows."""
    from tests.support.faults import poisoned

    flags = ("--checkpoint.every", "3", "--training.guard.max_skipped", "2")
    with poisoned(lambda row: 8 * 4 <= row < 8 * 6):
        train(directory / "run", *flags, steps=9)
    skipped = json.loads((directory / "run" / "skipped.json").read_text())
    return parts_of_run(directory / "run") | {"skipped rows": digest_of_record(skipped)}


def _finetuned(directory: pathlib.Path) -> dict[str, str]:
    from experiments import finetune

    train(directory / "base")
    adapter = ["adapter:lora", "--adapter.rank", "2", "--checkpoint.initial.path"]
    where = [str(directory / "base"), "--run.directory", str(directory / "tuned")]
    length = ["--training.steps", "2", "--schedule.warmup_steps", "1", "--tracking.trackers"]
    _check(finetune.main([*adapter, *where, *length, *QUIET]))
    return parts_of_run(directory / "tuned")


def _reinforced(directory: pathlib.Path) -> dict[str, str]:
    """Two steps on answers of the model to sums."""
    from experiments.rl import __main__ as rl

    sums = [f"{a}+{b}={a + b}\n" for a in range(10) for b in range(10)] * 4
    text = directory / "sums.jsonl"
    text.write_text("\n".join(json.dumps({"text": line}) for line in sums))
    data = ("data:files", "--data.path", str(text), "--data.cache", str(directory))
    train(directory / "base", *data, "--model.vocab_size", "256", steps=3)
    where = ["--checkpoint.initial.path", str(directory / "base")]
    where += ["--run.directory", str(directory / "run"), "reward:arithmetic"]
    sizes = ["--rl.group", "2", "--rl.prompts", "4", "--rl.max_tokens", "4"]
    length = ["--training.steps", "2", "--schedule.warmup_steps", "1", "--tracking.trackers"]
    _check(rl.main([*where, *sizes, *length, *QUIET]))
    return parts_of_run(directory / "run")


def _generated(directory: pathlib.Path) -> dict[str, str]:
    """Texts of a run: greedy, sampled, several together; and its held-out loss anew."""
    from jaxmoe.run import Run

    train(directory / "run")
    run = Run.open(directory / "run")
    texts = {
        "greedy": run.generate("1 2", length=6, temperature=0.0).text,
        "sampled": run.generate("1 2", length=6, temperature=1.0, top_k=5, top_p=0.9).text,
        "together": [sample.text for sample in run.generate(["1 2", "3"], length=6)],
    }
    return {
        "tokens": digest_of_record(texts),
        "held-out loss": digest_of_record(run.evaluate().bits_per_token),
    }


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"the command ended with exit code {code}")
