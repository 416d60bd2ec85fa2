# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind when its loop ends: samples, pictures, report, summary, last words."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Shaped

from jaxmoe.configs import to_json
from jaxmoe.data import Source, ngram_bits_per_byte, xz_bits_per_byte
from jaxmoe.disk import DiskGuard, replace_file
from jaxmoe.execution import ExecutionConfig
from jaxmoe.messages import say
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.decode import generate
from jaxmoe.models.diffuse import diffuse
from jaxmoe.resilience import goodput
from jaxmoe.routing.balancers import conversions
from jaxmoe.routing.telemetry import LoadWindow
from jaxmoe.run.assemble import Assembly, entropy_floor, mesh_in_words, sequence_form
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporter import Reporter
from jaxmoe.tracking.indicators import over_layers, read_indicators
from jaxmoe.tracking.jsonl import read_metrics
from jaxmoe.tracking.plots import plot_run
from jaxmoe.tracking.report import write_report
from jaxmoe.tracking.router_load import read_router_load
from jaxmoe.tracking.stability import judge_run
from jaxmoe.tracking.tracker import (
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    DROPPED_FRACTION,
    LOAD_BALANCE,
    LOSS,
    MAX_VIOLATION,
)
from jaxmoe.training.loop import LoopResult
from jaxmoe.training.throughput import peak_memory
from pallas_kernels import OPERATIONS, Implementation
from sharding.expert_parallel import AllToAllConfig, AllToAllDroppingConfig, LeastLoadedConfig
from sharding.expert_parallel.transport import choose_transport

logger = logging.getLogger(__name__)

_BOUNDED = {True: "bounded", False: "NOT bounded", None: "not judged"}
"""By the verdict of an indicator."""


def leave(
    name: str,
    directory: RunDirectory,
    assembly: Assembly,
    reporter: Reporter,
    result: LoopResult,
    facts: Mapping[str, Any],
) -> None:
    """Writes the run's last files and prints its last words; a full disk is a warning.

    Args:
        name: of the run.
        directory: where to.
        assembly: what ran.
        reporter: with the last metrics; closed here.
        result: how the loop ended.
        facts: status, steps, times and checkpoint step.
    """
    reporter.close()
    if jax.process_index() != 0:
        return
    references = reference_lines(assembly)
    summary = summarise(assembly, reporter, facts, references)
    if directory.router_file.exists():
        summary["router_load_window"] = load_window(*read_router_load(directory.router_file))
    if stability := judge_indicators(directory):
        summary["stability"] = stability
    samples = ""
    length = assembly.plan.config.tracking.sample_length
    if result.status == "done" and length and jax.process_count() == 1:
        samples = sample_text(assembly, result, length)
        with DiskGuard(directory.samples_file).warning_once():
            replace_file(directory.samples_file, samples)
    with DiskGuard(directory.report_file).warning_once():
        plot_run(
            directory.metrics_file,
            directory.router_file,
            directory.plots_directory,
            indicators_file=directory.indicators_file,
            references=references,
            bytes_per_token=assembly.source.bytes_per_token,
        )
        config = to_json(assembly.plan.config)
        write_run_report(directory, name, summary, samples, config)
    try:
        directory.write_summary(summary)
    except ValueError as error:
        logger.warning("%s", error)
    say(last_words(directory, summary, references))


def load_window(
    steps: Shaped[np.ndarray, " n"], load: Float[np.ndarray, "n L E"], length: int = 100
) -> dict[str, Any] | None:
    """The load of the last steps taken together, of the worst layer; None without a step.

    A batch is never quite even by chance: what is uneven over many steps is the router.

    Args:
        steps: numbers of the steps.
        load: share of the assignments of each expert.
        length: steps of the window.
    """
    if not load.size:
        return None
    window = LoadWindow.empty(jax.numpy.asarray(load[0]))
    for row in load[-length:]:
        window = window.add(jax.numpy.asarray(row))
    worst = {name: float(values.max()) for name, values in window.summarise().items()}
    return {"steps": [int(steps[-length:][0]), int(steps[-1])], **worst}


def write_run_report(
    directory: RunDirectory,
    name: str,
    summary: Mapping[str, Any],
    samples: str,
    config: Mapping[str, Any],
) -> None:
    """Writes the page about a run from its files and its summary.

    Args:
        directory: of the run.
        name: of the run.
        summary: the content of summary.json.
        samples: generated text, or nothing.
        config: as JSON.

    Raises:
        OSError: the page cannot be written.
    """
    has_loads = directory.router_file.exists()
    indicators = directory.plots_directory / "indicators.png"
    write_report(
        directory.report_file,
        title=f"jaxmoe: {name}",
        summary=summary,
        metrics=read_metrics(directory.metrics_file),
        load=read_router_load(directory.router_file) if has_loads else None,
        plots=[indicators] if indicators.exists() else (),
        samples=samples,
        config=config,
    )


def judge_indicators(directory: RunDirectory) -> dict[str, str]:
    """Which indicators stayed bounded, with the numbers in words."""
    if not directory.indicators_file.exists():
        return {}
    _, series = read_indicators(directory.indicators_file)
    means = {name: over_layers(name, values) for name, values in series.items()}
    return {
        name: f"{_BOUNDED[verdict.holds]}: {verdict.words}"
        for name, verdict in judge_run(means).items()
    }


def reference_lines(assembly: Assembly) -> dict[str, float]:
    """Bits per byte (or token) of predictors that everybody knows, by label."""
    floor, source = entropy_floor(assembly), assembly.source
    if floor is not None:
        return {"exact entropy": floor}
    train, held_out = source.text("train"), source.text("validation")
    if train is None or held_out is None:
        return {}
    orders = ngram_bits_per_byte(train, held_out, orders=(1, 2, 3))
    lines = {f"{order}-byte context counts": bits for order, bits in orders.items()}
    return {**lines, "xz": xz_bits_per_byte(held_out)}


def summarise(
    assembly: Assembly,
    reporter: Reporter,
    facts: Mapping[str, Any],
    references: Mapping[str, float],
) -> dict[str, Any]:
    """The numbers of summary.json."""
    plan, last = assembly.plan, reporter.last
    training, moe = plan.config.training, plan.model.moe
    active = plan.table.active(moe.top_k, moe.num_experts) if moe else plan.table.total
    balance, pooled = last.get(LOAD_BALANCE), last.get("router/load_balance_pooled")
    units = conversions(balance, top_k=moe.top_k, pooled=pooled) if moe and balance else {}
    memory, measured_on = peak_memory(jax.local_devices())
    return {
        "status": facts["status"],
        "steps": facts["steps"],
        "tokens": training.tokens_before(facts["steps"]),
        "final_loss": last.get(LOSS),
        "eval_bits_per_byte": last.get(BITS_PER_BYTE),
        "eval_bits_per_token": last.get(BITS_PER_TOKEN),
        "tokens_per_second": reporter.tokens_per_second,
        "parameters_total": plan.table.total,
        "parameters_active": active,
        "compile_seconds": facts["compile_seconds"],
        "wall_seconds": facts["wall_seconds"],
        "trained_seconds": reporter.trained_seconds,
        "mfu": reporter.mfu,
        "model_flops_per_token": reporter.flops_per_token,
        "peak_memory_bytes": memory,
        "peak_memory_of": measured_on,
        "router_max_violation": last.get(MAX_VIOLATION),
        "router_dropped_fraction": last.get(DROPPED_FRACTION),
        "checkpoint_step": facts["checkpoint_step"],
        "restored_from": facts.get("restored_from"),
        "skipped_steps": reporter.skipped,
        "rollbacks": len(assembly.loader.skipped.windows),
        "mesh": mesh_in_words(assembly.mesh),
        "implementations": implementations(assembly),
        "references_bits": dict(references),
        "bytes_per_token": assembly.source.bytes_per_token,
        "load_balance_units": units,
        "data": assembly.source.fingerprint(),
        "profile": facts.get("profile"),
        "goodput": facts.get("goodput"),
        "warnings": facts.get("warnings", []),
    }


def implementations(assembly: Assembly) -> dict[str, str]:
    """Which implementation of each kernel, and of the way to the experts, the run used."""
    kernels = assembly.execution.kernels
    asked: dict[str, Implementation | None]
    if assembly.execution.halo is None:
        asked = {"grouped_swiglu": kernels.grouped_swiglu}
    else:
        names = ("quantized_matmul", "grouped_matmul")
        asked = {name: getattr(kernels, name) for name in names}
    asked["flash_attention"] = kernels.attention
    found: dict[str, str]
    found = {name: OPERATIONS[name].choose(asked[name]).implementation for name in asked}
    dispatcher = assembly.execution.dispatcher
    if isinstance(dispatcher, AllToAllConfig | AllToAllDroppingConfig | LeastLoadedConfig):
        found["expert_transport"] = choose_transport(dispatcher.transport).transport
    if assembly.mesh.shape.get("seq", 2) > 1:  # a fold may have cut it in pieces
        found["sequence_parallel"] = sequence_form(assembly)
    return found


def sample_text(assembly: Assembly, result: LoopResult, length: int) -> str:
    """Text that the trained model writes after the first tokens of held-out rows."""
    training, source = assembly.plan.config.training, assembly.source
    prompt_length = min(64, training.sequence_length)
    if not assembly.plan.model.attention.is_causal:
        # It has learnt to fill rows of one length, and may see no position beyond it.
        prompt_length = training.sequence_length // 4
        length = training.sequence_length - prompt_length
    rows = [source.row("validation", row, prompt_length).tokens[:prompt_length] for row in (0, 1)]
    params = jax.device_get(result.state.params)
    router_state = jax.device_get(result.state.router_state)
    return continue_rows(
        assembly.plan.model, source, params, router_state, np.stack(rows), length, temperature=0.8
    )


def continue_rows(
    model: ModelConfig,
    source: Source,
    params: Any,
    router_state: Any,
    prompts: np.ndarray,
    length: int,
    *,
    temperature: float,
    seed: int = 0,
    execution: ExecutionConfig | None = None,
) -> str:
    """Prompts and their continuations as text, on one device.

    Args:
        model: of the parameters.
        source: that decodes tokens.
        params: on the host.
        router_state: on the host.
        prompts: [rows, tokens].
        length: tokens to write.
        temperature: of the sampling; 0 is greedy.
        seed: of the sampling.
        execution: how it is computed; defaults when None.
    """
    write = generate if model.attention.is_causal else fill_after
    written = write(
        model,
        params,
        jax.numpy.asarray(prompts),
        num_tokens=length,
        key=jax.random.key(seed),
        temperature=temperature,
        router_state=router_state,
        execution=execution,
    )
    texts = (
        f"--- prompt\n{source.decode(prompt)}\n--- continued\n{source.decode(row)}\n"
        for prompt, row in zip(prompts, np.asarray(written), strict=True)
    )
    return "\n".join(texts)


def fill_after(
    model: ModelConfig, params: Any, prompt: jax.Array, *, num_tokens: int, **given: Any
) -> jax.Array:
    """What masked diffusion fills in after prompts of one length: [rows, num_tokens].

    Args:
        model: not causal.
        params: of the model.
        prompt: [rows, tokens].
        num_tokens: to fill in.
        **given: further arguments of `diffuse`.
    """
    room = ((0, 0), (0, num_tokens))
    is_given = jax.numpy.pad(jax.numpy.ones_like(prompt, bool), room)
    tokens = jax.numpy.pad(prompt, room)
    # Twice as many steps as tokens: seldom are two filled in at once.
    filled = diffuse(model, params, tokens, is_given, num_steps=2 * num_tokens, **given)
    return filled[:, prompt.shape[1] :]


def last_words(
    directory: RunDirectory, summary: Mapping[str, Any], references: Mapping[str, float]
) -> str:
    """The end of the run in a few lines."""
    lines = [f"{summary['status']} at step {summary['steps']}"]
    if summary["checkpoint_step"] is not None and summary["status"] != "done":
        lines[0] += f"; the same command continues from step {summary['checkpoint_step']}"
    bits, unit = summary["eval_bits_per_byte"], "bits/byte"
    if bits is None:
        bits, unit = summary["eval_bits_per_token"], "bits/token"
    if bits is not None:
        beside = ", ".join(f"{label} {value:.3f}" for label, value in references.items())
        lines.append(f"held out {bits:.4f} {unit}" + (f"   ({beside})" if beside else ""))
    stability = summary.get("stability", {})
    if len(stability) > 1 and len(set(stability.values())) == 1:  # of a brief run
        stability = {"indicators": next(iter(stability.values()))}
    lines += [f"{name:24} {words}" for name, words in stability.items()]
    if summary.get("goodput"):
        lines.append(goodput.format_goodput(summary["goodput"]))
    if summary["profile"] is not None:
        lines.append(
            f"trace in {summary['profile']}: open it with `xprof --logdir {summary['profile']}`"
            " (pip install xprof), or its *.trace.json.gz at https://ui.perfetto.dev"
        )
    lines.append(f"see {directory.report_file}")
    return "\n".join(lines)
