# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds which layers of a trained run each sequence needs, and trains a router of such paths.

    jaxmoe layer_paths runs/pretrain/tiny
    jaxmoe layer_paths RUN --batches 4 --search.price 0.5

For each held-out sequence a tree search skips layers, runs them, or runs them twice (Dr.LLM, arXiv
2510.12773). A path that is found is never worse on its sequence than all layers, because it is
chosen by that loss: the second half of the sequence, given the first. A small router per layer then
learns to choose the paths from the first half alone, and is tried on as many other sequences, where
it can be worse. The model is not trained.

    better    share of sequences with less loss than with all layers
    shorter   share of sequences whose path runs fewer layers
    either    share of sequences that are better, or shorter and not worse

One device must hold the model. Writes layer_paths/summary.json and plots/layer_paths.png.
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
from jaxmoe.contrib.layerwise.chain import Chain
from jaxmoe.contrib.layerwise.layer_paths.router import route_rows, train_router
from jaxmoe.contrib.layerwise.layer_paths.rows import (
    REPEAT,
    RUN,
    SKIP,
    RoutedRows,
    along_paths,
    num_predicted,
)
from jaxmoe.contrib.layerwise.layer_paths.search import SearchConfig, find_paths
from jaxmoe.data import Batch
from jaxmoe.optional import require
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.tracking.plots import BLUE, GRAY, ORANGE, figure_of_panels, save_figure

HEADINGS = ("path", "sequences", "nats per token", "layers run", "better", "shorter", "either")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerPathsConfig:
    """Run whose paths are searched."""

    run: FinishedRunConfig = FinishedRunConfig()
    """Trained run and checkpoint."""
    batches: int = 2
    """Held-out batches whose sequences are searched; the router is tried on as many others."""
    search: SearchConfig = SearchConfig()
    """Search of a path for each sequence."""
    epochs: int = 25
    """Passes over the paths that were found, for the router."""

    def __post_init__(self):
        for field in ("batches", "epochs"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prog = "jaxmoe layer_paths"
    config = flags.parse_flags(LayerPathsConfig(), with_model(argv), prog, with_about(__doc__))
    announce(f"searching paths through {config.run.directory}: reading the checkpoint ...")
    with flags.exit_on_bad_configuration():
        require("matplotlib")
        start_process()
        say(_compare(config))
    return int(ExitCode.DONE)


def _compare(config: LayerPathsConfig) -> str:
    """Search, train and write the files; return the tables and the sentence."""
    run_config = config.run
    if jax.process_count() > 1:
        raise ValueError(
            f"paths are searched in one process, and there are {jax.process_count()}: start it on"
            " one host"
        )
    assembly, state, step = load_run(
        run_config.directory, run_config.step, run_config.mesh, initial=run_config.initial
    )
    model = assembly.plan.model
    if not model.attention.is_causal:
        raise ValueError(
            "model.attention.is_causal=False: a path is chosen from the first half of a sequence,"
            " which this model computes from the second as well: choose a causal run"
        )
    batches = [jax.tree.map(np.asarray, jax.device_get(batch)) for batch in assembly.held_out()]
    number = min(config.batches, len(batches) // 2)
    if not number:
        raise ValueError(
            f"the run holds out {len(batches)} batch, and paths need two: train it with"
            " --evaluation.batches 2 or more"
        )
    chain = Chain.of(model, assembly.execution, state.params, state.router_state).on_one_device()
    baseline, best, router_losses, tried = find_and_route(chain, batches[: 2 * number], config)
    all_layers = tried["all layers"]
    rows = [
        _row("all layers", "searched", baseline, baseline),
        _row("found", "searched", best, baseline),
        _row("all layers", "other", all_layers, all_layers),
        _row("by the router", "other", tried["router"], all_layers),
    ]
    sentence = _sentence(rows, baseline.paths.shape[1])
    names = [f"{c.layer}" + (f" turn {c.turn}" if c.turn else "") for c in chain.calls]
    shares = {"found": _shares(best), "router": _shares(tried["router"])}
    directory = RunDirectory(run_config.directory)
    summary = {"status": "done", "checkpoint_step": step, "sentence": sentence, "paths": rows}
    summary |= {"layers": names, "shares": {key: x.tolist() for key, x in shares.items()}}
    summary |= {"simulations": config.search.simulations, "router_losses": router_losses}
    RunDirectory(directory.path / "layer_paths").write_summary(summary)
    with directory.usable():
        directory.plots_directory.mkdir(exist_ok=True)
    target = directory.plots_directory / "layer_paths.png"
    _draw(target, names, shares, ((best, baseline), (tried["router"], all_layers)), sentence)
    return format_paths(rows, names, shares, sentence)


def find_and_route(
    chain: Chain, batches: Sequence[Batch], config: LayerPathsConfig
) -> tuple[RoutedRows, RoutedRows, list[float], dict[str, RoutedRows]]:
    """Search one half of the batches, train a router on what is found, and route the other half.

    Args:
        chain: Causal model on one device.
        batches: Host batches, an even number.
        config: Search and router.

    Returns:
        The searched sequences with all layers and along the paths that were found, the loss of the
        router by epoch, and the other sequences with all layers and along the router's paths.
    """
    half = len(batches) // 2
    searched, unsearched = (_join(part) for part in (batches[:half], batches[half:]))
    shape = len(searched.tokens), len(chain.calls)
    baseline = along_paths(chain, searched, np.full(shape, RUN))
    paths = find_paths(lambda p: along_paths(chain, searched, p).losses, shape, config.search)
    best = along_paths(chain, searched, paths)
    trained = {"epochs": config.epochs, "seed": config.search.seed}
    router, losses = train_router(best.windows, paths, **trained)
    all_layers = along_paths(chain, unsearched, np.full((len(unsearched.tokens), shape[1]), RUN))
    return (
        baseline,
        best,
        losses,
        {"all layers": all_layers, "router": route_rows(chain, unsearched, router)},
    )


def _join(batches: Sequence[Batch]) -> Batch:
    """Return the rows of some batches that have tokens to predict in their second half."""
    fields = ("tokens", "targets", "loss_weights", "segment_ids")
    arrays: dict[str, Any] = {}
    for name in fields:
        parts = [getattr(batch, name) for batch in batches]
        arrays[name] = None if parts[0] is None else np.concatenate(parts)
    batch = Batch(**arrays)
    is_predicted = num_predicted(batch) > 0.0
    if not is_predicted.any():
        raise ValueError(
            "no held-out sequence has a token to predict in its second half: read more with"
            " --batches"
        )
    return jax.tree.map(lambda x: jnp.asarray(x[is_predicted]), batch)


def _row(path: str, sequences: str, rows: RoutedRows, baseline: RoutedRows) -> dict[str, Any]:
    """Return what is printed and written of some paths."""
    length = rows.paths.sum(axis=1)
    layers = rows.paths.shape[1]
    better = rows.losses < baseline.losses
    shorter = length < layers
    either = better | (shorter & (rows.losses <= baseline.losses))
    return {
        "path": path,
        "sequences": sequences,
        "number": len(length),
        "loss": float(rows.losses.mean()),
        "layers_run": float(length.mean()),
        "better": float(better.mean()),
        "shorter": float(shorter.mean()),
        "either": float(either.mean()),
    }


def _shares(rows: RoutedRows) -> np.ndarray:
    """Return the share of sequences by choice and layer [3 layers]."""
    return np.stack([(rows.paths == choice).mean(axis=0) for choice in (SKIP, RUN, REPEAT)])


def _sentence(rows: Sequence[dict[str, Any]], layers: int) -> str:
    baseline, best, all_layers, routed = rows
    return (
        f"{best['either']:.0%} of the sequences have a better or shorter path: {best['loss']:.4f}"
        f" nats per token with {best['layers_run']:.1f} of {layers} layers, {baseline['loss']:.4f}"
        f" with all; on others the router has {routed['loss']:.4f} with {routed['layers_run']:.1f},"
        f" and all layers {all_layers['loss']:.4f}"
    )


def format_paths(
    rows: Sequence[dict[str, Any]],
    names: Sequence[str],
    shares: dict[str, np.ndarray],
    sentence: str,
) -> str:
    """Return the table of the paths, that of the layers, and the sentence.

    Args:
        rows: Values of the summary.
        names: Name of each layer.
        shares: Share of sequences by choice and layer [3 layers].
        sentence: What was found.
    """
    table: list[tuple[str, ...]] = [HEADINGS]
    for row in rows:
        numbers = f"{row['loss']:.4f}", f"{row['layers_run']:.2f}"
        parts = tuple(f"{row[key]:.0%}" for key in ("better", "shorter", "either"))
        table.append((row["path"], f"{row['number']} {row['sequences']}", *numbers, *parts))
    layers: list[tuple[str, ...]] = [
        ("layer", "found: skip", "repeat", "router: skip", "repeat"),
        *(
            (name, *(f"{x[choice, i]:.0%}" for x in shares.values() for choice in (SKIP, REPEAT)))
            for i, name in enumerate(names)
        ),
    ]
    return "\n".join([text_table(table), "", text_table(layers), "", sentence])


def _draw(
    path: Any,
    names: Sequence[str],
    shares: dict[str, np.ndarray],
    pairs: Sequence[tuple[RoutedRows, RoutedRows]],
    sentence: str,
) -> None:
    """Draw the choices by layer, and loss against length of every sequence."""
    figure, panels = figure_of_panels(14.4, 4.4, 1, 3)
    places = np.arange(len(names))
    colors = (GRAY, BLUE, ORANGE)
    for axes, (title, share) in zip(panels, shares.items(), strict=False):
        for choice, label in enumerate(("skip", "run", "repeat")):
            bottom = share[:choice].sum(axis=0)
            axes.bar(places, share[choice], bottom=bottom, color=colors[choice], label=label)
        axes.set_xticks(places[:: -(-len(names) // 12)], names[:: -(-len(names) // 12)])
        axes.set(xlabel="layer", ylabel="share of sequences", title=title)
        axes.legend(loc="lower right", fontsize=8)
    for (rows, baseline), label, color in zip(pairs, shares, (BLUE, ORANGE), strict=True):
        change = rows.losses - baseline.losses
        panels[2].plot(rows.paths.sum(axis=1), change, "o", color=color, ms=4, label=label)
    panels[2].axhline(0.0, color=GRAY, linewidth=0.8)
    panels[2].axvline(len(names), color=GRAY, linewidth=0.8)
    panels[2].set(xlabel="layers run", ylabel="nats per token - all layers", title="each sequence")
    panels[2].legend(loc="best", fontsize=8)
    figure.suptitle(sentence, fontsize=9)
    save_figure(figure, path)


if __name__ == "__main__":
    run_command(main)
