# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Shows what every layer of a trained run contributes, and which layers do almost nothing.

    jaxmoe depth runs/pretrain/tiny
    jaxmoe depth runs/pretrain/deep --against runs/pretrain/tiny
    jaxmoe depth runs/pretrain/tiny --sweeps 4

For held-out tokens, layer by layer:

    branch   length of what the layer adds over that of the stream before it
    cosine   of both; below 0 the layer removes what is there
    later    change of the branches of later layers without the layer, mean over them
    output   change of the predicted distribution without the layer (total variation distance)

`--against` fits linear maps from the stream after each layer to those of another run, which must
read the same tokens; a small error says that the two layers know the same. `--sweeps` evaluates the
equal layers in parallel (SNLP) and prints the loss after 1, 2, ... sweeps beside that of the usual
order, which as many sweeps as layers reach; one device must hold the model for that. Writes
depth/summary.json and plots/depth.png.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cli import flags
from experiments.cli.exit import run_command
from experiments.cli.exit_codes import ExitCode
from experiments.cli.model import with_about, with_model
from experiments.cli.output import announce, say
from experiments.cli.process import start_process
from experiments.cli.tables import text_table
from experiments.evaluate import FinishedRunConfig
from jaxmoe.contrib.layerwise.chain import Chain, layer_calls
from jaxmoe.contrib.layerwise.depth import (
    DepthMeasures,
    describe_depth,
    map_error,
    measure_depth,
    streams_of,
)
from jaxmoe.contrib.layerwise.depth_plot import plot_depth
from jaxmoe.contrib.layerwise.layer_parallel import parallel_scan, sweep_streams
from jaxmoe.data import Batch
from jaxmoe.optional import require
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.training.state import TrainState
from sharding.distributed import global_batch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DepthConfig:
    """Run whose layers are measured."""

    run: FinishedRunConfig = FinishedRunConfig()
    """Trained run and checkpoint."""
    against: str | None = None
    """Run directory of another run, to whose layers linear maps are fitted; None fits none."""
    batches: int = 2
    """Held-out batches that are read, at most those of the run."""
    sweeps: int = 0
    """Largest number of sweeps over equal layers in parallel; 0 makes none."""

    def __post_init__(self):
        for field, least in (("batches", 1), ("sweeps", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)} must be at least {least}")


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prog = "jaxmoe depth"
    config = flags.parse_flags(DepthConfig(), with_model(argv), prog, with_about(__doc__))
    announce(f"measuring the layers of {config.run.directory}: reading the checkpoint ...")
    with flags.exit_on_bad_configuration():
        require("matplotlib")
        start_process()
        measures, findings = _measure(config)
    say(format_depth(measures, findings))
    return int(ExitCode.DONE)


def _measure(config: DepthConfig) -> tuple[DepthMeasures, dict[str, Any]]:
    """Return the measures, and the JSON values that are written beside the run."""
    config_of_run = config.run
    if jax.process_count() > 1:
        raise ValueError(
            f"the layers of a run are measured in one process, and there are {jax.process_count()}:"
            " start it on one host, with --run.mesh.data for its devices"
        )
    assembly, state, step = load_run(
        config_of_run.directory,
        config_of_run.step,
        config_of_run.mesh,
        initial=config_of_run.initial,
    )
    model = _chain(assembly, state)
    if config.sweeps:
        parallel_scan(model.model)
    batches = list(assembly.held_out())[: config.batches]
    with jax.set_mesh(assembly.mesh):
        measures = measure_depth(model, batches)
    findings: dict[str, Any] = {"status": "done", "checkpoint_step": step}
    findings |= {"sentence": describe_depth(measures), "tokens": measures.num_tokens}
    findings["layers"] = [
        {"layer": name, "kind": kind, "branch": a, "cosine": b, "later": c, "output": d}
        for name, kind, a, b, c, d in zip(
            measures.layers,
            measures.kinds,
            measures.ratio.tolist(),
            measures.cosine.tolist(),
            _means(measures.later),
            measures.output.tolist(),
            strict=True,
        )
    ]
    findings["later"] = measures.later.tolist()
    errors = None
    names = ()
    if config.against is not None:
        errors, names = _maps(config, assembly, model, batches)
        findings["map"] = {"against": config.against, "error": errors.tolist(), "layers": names}
    if config.sweeps:
        findings["sweeps"] = sweep_losses(model, batches, config.sweeps)
    _write(RunDirectory(config_of_run.directory), measures, findings, errors, names)
    return measures, findings


def _write(
    run: RunDirectory,
    measures: DepthMeasures,
    findings: dict[str, Any],
    errors: np.ndarray | None,
    names: tuple[str, ...],
) -> None:
    """Write the summary and the picture into the directory of the run."""
    RunDirectory(run.path / "depth").write_summary(findings)
    with run.usable():
        run.plots_directory.mkdir(exist_ok=True)
    plot_depth(
        run.plots_directory / "depth.png",
        measures,
        errors=errors,
        other_layers=names,
        title=findings["sentence"],
    )


def _chain(assembly: Assembly, state: TrainState) -> Chain:
    return Chain.of(assembly.plan.model, assembly.execution, state.params, state.router_state)


def _maps(
    config: DepthConfig, assembly: Assembly, model: Chain, batches: list[Batch]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the errors of linear maps to the other run, and the names of its layers."""
    path = str(config.against)
    other_assembly, state, _ = load_run(path, None, config.run.mesh, needs_data=False)
    sizes = [side.plan.model.vocab_size for side in (assembly, other_assembly)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"against={path} has {sizes[1]} token ids and run.directory={config.run.directory}"
            f" {sizes[0]}: the runs must read the same tokens"
        )
    with jax.set_mesh(assembly.mesh):
        streams = streams_of(model, batches)
    with jax.set_mesh(other_assembly.mesh):
        theirs = _chain(other_assembly, state)
        moved = [global_batch(jax.device_get(batch), other_assembly.mesh) for batch in batches]
        other_streams = streams_of(theirs, moved)
    return map_error(streams, other_streams), tuple(
        f"{call.layer}" + (f" turn {call.turn}" if call.stack.turns > 1 else "")
        for call in layer_calls(other_assembly.plan.model)
    )


def sweep_losses(model: Chain, batches: Sequence[Batch], sweeps: int) -> dict[str, Any]:
    """Return nats per token in the usual order, and after 1, 2, ... sweeps, on one device.

    Args:
        model: Trained model.
        batches: Held-out batches.
        sweeps: Largest number of sweeps.
    """
    model = model.on_one_device()
    totals = np.zeros(sweeps + 1)
    weight = 0.0
    for held_out_batch in batches:
        batch = jax.tree.map(jnp.asarray, jax.device_get(held_out_batch))
        stream, context = model.begin(batch.tokens, batch.segment_ids)
        for call in layer_calls(model.model):
            stream = model.call(call, stream, context)
        ends = [stream, *sweep_streams(model, batch.tokens, batch.segment_ids, sweeps)]
        totals += [float(_nll(model.logits(end), batch)) for end in ends]
        weight += float(batch.loss_weights.sum())
    baseline, *after = (totals / weight).tolist()
    return {"usual": baseline, "after": after}


@jax.jit
def _nll(logits: jax.Array, batch: Batch) -> jax.Array:
    """Return the summed loss of the next tokens."""
    scores = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(scores, batch.targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(chosen * batch.loss_weights)


def format_depth(measures: DepthMeasures, findings: dict[str, Any]) -> str:
    """Return the table of the layers, that of the sweeps, and the sentence.

    Args:
        measures: Measures of the layers.
        findings: Values of the summary.
    """
    headings = ("layer", "mixer, feed-forward", "branch", "cosine", "later", "output")
    maps = findings.get("map")
    rows: list[tuple[str, ...]] = [headings + (("nearest there", "error") if maps else ())]
    for place, row in enumerate(findings["layers"]):
        later = "" if row["later"] is None else f"{row['later']:.1%}"
        numbers = (f"{row['branch']:.3f}", f"{row['cosine']:+.2f}", later, f"{row['output']:.1%}")
        cells: tuple[str, ...] = (row["layer"], row["kind"], *numbers)
        if maps:
            errors = maps["error"][place]
            nearest = int(np.argmin(errors))
            cells += (maps["layers"][nearest], f"{errors[nearest]:.2g}")
        rows.append(cells)
    lines = [text_table(rows), ""]
    if "sweeps" in findings:
        baseline = findings["sweeps"]["usual"]
        after = findings["sweeps"]["after"]
        table = [("sweeps", "nats per token", "above the usual order")]
        table += [(str(k + 1), f"{x:.4f}", f"{x - baseline:+.4f}") for k, x in enumerate(after)]
        lines += [text_table(table), f"usual order: {baseline:.4f} nats per token", ""]
    return "\n".join([*lines, f"{findings['sentence']} ({measures.num_tokens} tokens)"])


def _means(later: np.ndarray) -> list[float | None]:
    """Return the mean effect of each layer on later ones; None for the last."""
    return [float(np.nanmean(row)) if np.isfinite(row).any() else None for row in later]


if __name__ == "__main__":
    run_command(main)
