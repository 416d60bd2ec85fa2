# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Converts a run to 8 or 4 bits, to plain weights, or to Hugging Face files and back.

    jaxmoe checkpoint convert runs/pretrain/tiny --quantise w4a8
    jaxmoe generate runs/pretrain/tiny-w4a8 --cache int4
    jaxmoe checkpoint convert RUN --quantise w4ax --mixed.wide_fraction 0.125
    jaxmoe checkpoint convert RUN --to_huggingface auto --to DIR
    jaxmoe checkpoint convert DIR --to RUN
    jaxmoe checkpoint convert runs/finetune/tiny-lora --fold True
    jaxmoe checkpoint convert FINETUNED --to_huggingface peft
    jaxmoe checkpoint convert ADAPTER --imported.base DIR --to RUN

The result is a run directory for evaluate and generate (config.json, one checkpoint without the
optimiser's state, summary.json with sizes and errors), or a directory that from_pretrained of
transformers reads. It is written under a temporary name and renamed; the source is not changed.

w4ax (COMET, arXiv 2410.12168) measures the activations of each matrix on held-out batches, and
keeps 8 bits for the blocks of channels with the largest ones. bitstack (BitStack, arXiv 2410.23918)
keeps as many small blocks as --budget has a place for.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.checkpoint.converted import fold_run, write_converted
from experiments.checkpoint.huggingface import (
    ExportConfig,
    ExportFamily,
    ImportConfig,
    export_run,
    import_run,
)
from experiments.checkpoint.peft import export_adapter, import_adapter
from experiments.cli import flags as cli
from experiments.cli.following import after_conversion, say_next
from experiments.cli.model import RUN, value_of, with_about, with_model
from experiments.cli.new_path import check_new_path
from experiments.cli.output import say
from experiments.cli.parts import part_at
from experiments.cli.process import start_process
from experiments.cli.tables import text_table
from experiments.evaluate import FinishedRunConfig
from jaxmoe.checkpoint.huggingface.hub import is_hub_name, is_huggingface, model_directory
from jaxmoe.checkpoint.huggingface.peft import is_peft
from jaxmoe.messages import command_line
from jaxmoe.models.quantize import (
    dequantize_parameter,
    largest_error,
    mixed_block_size,
    quantize_parameter,
    scaled_axis,
    stored_bytes,
)
from jaxmoe.precision import MIXED, STACKED, MixedConfig
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.calibrate import measure_activations
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.provenance.saved import saved_config
from jaxmoe.training.state import TrainState
from pallas_kernels import MixedArray, QuantizedArray

Format = Literal["w4a8", "w8a8", "w4ax", "w4a4", "w4a16", "w8a16", "fp8", "bitstack"]
_STACK_RUN = "experiments.checkpoint.bitstack:stack_run"
"""Conversion of `--quantise bitstack`."""
_MODES = ("quantise", "to_huggingface", "from_huggingface", "fold")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BitStackConfig:
    """Blocks of a matrix (BitStack, arXiv 2410.23918)."""

    blocks: int = 16
    """Largest number of blocks of a matrix."""
    rank: int = 16
    """Inner width of the two float16 factors of a block; a smaller one makes smaller blocks."""
    batches: int = 4
    """Held-out batches on which activations and the loss with each block are measured, those after
    the batches of evaluation."""

    def __post_init__(self):
        for field in ("blocks", "rank", "batches"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"bitstack.{field}={value} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConvertConfig:
    """Source and target of a conversion."""

    run: FinishedRunConfig = FinishedRunConfig()
    """Run to convert."""
    to: str | None = None
    """Directory to write, which must not exist; the run's plus `-<format>` when None."""
    quantise: Format | None = None
    """Bits of weights (w) and of activations in their products (a; 16: the compute dtype; x: 8 for
    the channels with outliers, 4 for the others). fp8: both in float8_e4m3fn. bitstack: sums of
    small blocks, as many as --budget has a place for."""
    budget: str | None = None
    """Largest size of the parameters with --quantise bitstack, as 1.9MB; all blocks when None."""
    bitstack: BitStackConfig = BitStackConfig()
    """Blocks of --quantise bitstack."""
    fold: bool | None = None
    """Whether the adapter of a fine-tuned run is added to the weights that it adapts."""
    fold_bits: float | None = None
    """Largest mean of the bits of layers with --fold, of adapter:quantised_choices, from 2 to 4;
    that of its evaluation when None."""
    mixed: MixedConfig = MixedConfig()
    """Blocks and calibration of --quantise w4ax."""
    to_huggingface: ExportFamily | None = None
    """Family of transformers to write; auto: the family that computes the model, or jaxmoe, which
    has its own modelling file. peft: the adapter of a fine-tuned run, as PEFT writes it."""
    exported: ExportConfig = ExportConfig()
    """Options of --to_huggingface."""
    from_huggingface: str | None = None
    """Directory to convert to a run: config.json, safetensors and tokenizer.json of a model, or
    an adapter of PEFT."""
    imported: ImportConfig = ImportConfig()
    """Options of --from_huggingface."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rounded:
    """Size and error of one rounded matrix."""

    path: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    largest_error: float
    largest_value: float
    wide: str = ""
    """Blocks with 8-bit activations and all blocks, "1/8"; empty except in w4ax."""

    @property
    def relative(self) -> float:
        """Largest error divided by the largest value."""
        return self.largest_error / self.largest_value if self.largest_value else 0.0


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe checkpoint convert"
    has_source = value_of("--from_huggingface", argv) is not None
    arguments = with_model(argv, flag_of=_flag_of, has_default=not has_source)
    config = cli.parse_flags(ConvertConfig(), arguments, prog, with_about(__doc__))
    with cli.exit_on_bad_configuration():
        start_process(has_steps=False)
    with cli.exit_on_bad_configuration():
        say(convert(config))
        mode = next(name for name in _MODES if getattr(config, name) is not None)
        if config.to_huggingface != "peft":
            say_next(after_conversion(mode, _target(config)))
    return int(cli.ExitCode.DONE)


def _flag_of(word: str) -> str:
    """Return the flag of a model: a run is the source, other models become one."""
    is_foreign = is_huggingface(word) or is_peft(word) or is_hub_name(word)
    return "--from_huggingface" if is_foreign else RUN


def convert(config: ConvertConfig) -> str:
    """Write the converted run.

    Args:
        config: Source and target.

    Returns:
        A report for the user.

    Raises:
        ValueError: No format is given, the run is missing or already converted, weights are not
            finite, or the target exists.
    """
    form = config.quantise
    source = config.run.directory
    modes = [name for name in _MODES if getattr(config, name) is not None]
    if not modes:
        raise ValueError(
            "convert needs a target: give --quantise w4a8, w8a8, w4ax, w4a4, w4a16, w8a16, fp8"
            " or bitstack, or --to_huggingface auto, or --from_huggingface DIR, or --fold True"
        )
    if len(modes) > 1:
        raise ValueError(f"--{' and --'.join(modes)} exclude each other: give one")
    if config.mixed != MixedConfig() and form != MIXED:
        raise ValueError(
            f"--mixed changes nothing without --quantise {MIXED}: leave it out, or ask for {MIXED}"
        )
    if form != STACKED and (config.budget is not None or config.bitstack != BitStackConfig()):
        raise ValueError(
            f"--budget and --bitstack change nothing without --quantise {STACKED}: leave them out,"
            f" or ask for {STACKED}"
        )
    if config.fold_bits is not None and not config.fold:
        raise ValueError("--fold_bits changes nothing without --fold True: leave it out")
    if jax.process_count() > 1:
        raise ValueError("convert runs in one process: start it on one host")
    if config.from_huggingface is not None:
        if config.to is None:
            raise ValueError("--from_huggingface needs --to RUN: the run directory to make")
        place = model_directory(config.from_huggingface, "from_huggingface")
        if is_peft(place):
            return import_adapter(place, _free(config.to), config.imported)
        return import_run(config.from_huggingface, _free(config.to), config.imported)
    target = _free(_target(config))
    run = config.run
    if config.to_huggingface == "peft":
        return export_adapter(source, run.step, target, config.exported)
    if config.to_huggingface is not None:
        return export_run(source, run.step, target, config.to_huggingface, config.exported)
    if config.fold:
        return fold_run(config.run, target, config.fold_bits)
    assert form is not None  # the remaining mode
    _check_source(source, form)
    if form == STACKED:
        return part_at(_STACK_RUN)(run, config.budget, config.bitstack, target)
    return _to_few_bits(config, form, target)


def _target(config: ConvertConfig) -> str:
    """Return the directory to write."""
    suffix = config.quantise or ("folded" if config.fold else "huggingface")
    return config.to or f"{config.run.directory.rstrip('/')}-{suffix}"


def _check_source(source: str, form: Format) -> None:
    """Raise ValueError if a run is in few bits already, or has layers that cannot be."""
    config = saved_config(source)
    weights = config.execution.precision.weights
    if weights not in ("floating", STACKED) or (weights == STACKED and form != STACKED):
        raise ValueError(
            f"run.directory={source} is converted already, to {weights}: convert the run that it"
            " came from"
        )
    if config.model.adapter is not None:
        raise ValueError(
            f"run.directory={source} holds an adapter ({config.model.adapter.name}): fold it first,"
            f" {command_line('checkpoint', 'convert', source, '--fold', 'True')}"
        )
    mixers = [kind.mixer for kind in config.model.kinds if not kind.mixer.can_quantize]
    if mixers:
        raise ValueError(
            f"run.directory={source} holds a model whose {mixers[0].name} layers"
            " cannot be quantised: convert a model with grouped_query attention alone"
        )


def _to_few_bits(config: ConvertConfig, form: Format, target: pathlib.Path) -> str:
    """Write the run in a format, and return the report."""
    source = config.run.directory
    run_config = saved_config(source)
    needs_data = form == MIXED  # to measure activations
    assembly, state, step = load_run(
        source,
        config.run.step,
        config.run.mesh,
        needs_data=needs_data,
        initial=config.run.initial,
    )
    params, rounded = _quantise(assembly, state, form, config.mixed)
    before = stored_bytes(state.params)
    after = stored_bytes(params)
    mixed = config.mixed if form == MIXED else None
    precision = dataclasses.replace(run_config.execution.precision, weights=form, mixed=mixed)
    execution = dataclasses.replace(run_config.execution, precision=precision)
    # On the mesh of the other arrays, as a checkpoint requires.
    params = jax.device_put(params, NamedSharding(assembly.mesh, PartitionSpec()))
    state = dataclasses.replace(state, params=params, opt_state={})
    summary = {
        "status": "converted",
        "format": form,
        "source": source,
        "checkpoint_step": step,
        "parameters_total": assembly.plan.table.total,
        "parameter_bytes_before": before,
        "parameter_bytes": after,
        "rounded": {
            report.path: {
                "largest_error": report.largest_error,
                "largest_value": report.largest_value,
                **({"wide_blocks": report.wide} if report.wide else {}),
            }
            for report in rounded
        },
    }
    if form == MIXED:
        summary["calibration"] = {
            "batches": config.mixed.batches,
            "first_batch": run_config.evaluation.batches,
            "rows": config.mixed.batches * run_config.held_out_batch_size,
            "tokens": config.mixed.batches
            * run_config.held_out_batch_size
            * run_config.training.sequence_length,
        }
    config_of_run = dataclasses.replace(run_config, execution=execution)
    write_converted(target, RunDirectory(source), state, step, config_of_run, assembly, summary)
    share = sum(report.bytes_before for report in rounded) / before
    lines = [
        _table(rounded),
        "",
        f"{form}: parameters {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB"
        f" ({before / after:.1f} times fewer; {share:.0%} of them rounded, the others as trained)",
        f"step {step} of {source} is in {target}",
    ]
    return "\n".join(lines)


def _quantise(
    assembly: Assembly, state: TrainState, form: Format, mixed: MixedConfig
) -> tuple[Any, list[Rounded]]:
    """Return the rounded parameters, computed one by one on one device, and the errors.

    Raises:
        ValueError: A matrix is not finite, or what w4ax needs does not fit the model or the data.
    """
    rounded = list[Rounded]()
    measured = dict[str, Any]()
    if form == MIXED:
        for row in assembly.plan.table:
            if scaled_axis(row) is not None:
                mixed_block_size(row, mixed)  # raises before the passes over data
        measured = measure_activations(assembly, state, mixed.batches)

    def one(row: Any, value: Any) -> Any:
        matrix = jnp.asarray(np.asarray(value))
        largest = measured.get(row.path)
        new = jax.jit(lambda x, y: quantize_parameter(row, x, form, mixed, y))(matrix, largest)
        if not isinstance(new, QuantizedArray | MixedArray):
            return new
        error, largest = jax.jit(lambda x, new: largest_error(x, dequantize_parameter(new)))(
            matrix, new
        )
        if not np.isfinite(largest):
            raise ValueError(
                f"parameter {row.path} is not finite and cannot be rounded: choose an earlier"
                " checkpoint with --run.step"
            )
        rounded.append(
            Rounded(
                path=row.path,
                shape=row.shape,
                bytes_before=stored_bytes(matrix),
                bytes_after=stored_bytes(new),
                largest_error=float(error),
                largest_value=float(largest),
                wide=_wide(new),
            )
        )
        return new

    rows = assembly.plan.table.tree(lambda row: row)
    params = jax.tree.map(one, rows, state.params)
    return params, rounded


def _wide(matrix: QuantizedArray | MixedArray) -> str:
    """Return the wide blocks and all blocks of a matrix."""
    if not isinstance(matrix, MixedArray):
        return ""
    block_size = matrix.weights.values.size // matrix.weights.scales.size
    return f"{matrix.num_wide}/{matrix.order.shape[-1] // block_size}"


def _free(path: str) -> pathlib.Path:
    """Return the path, or raise if it exists or cannot be made."""
    target = pathlib.Path(path).expanduser()
    if target.exists():
        raise ValueError(f"to={target} exists already: remove it, or choose another with --to")
    check_new_path("to", path, "directory")
    return target


def _table(rounded: list[Rounded]) -> str:
    head = ("matrix", "shape", "kB before", "kB after", "largest error", "of the largest value")
    has_wide = any(report.wide for report in rounded)
    rows = [
        (
            report.path,
            "x".join(map(str, report.shape)),
            f"{report.bytes_before / 1e3:.1f}",
            f"{report.bytes_after / 1e3:.1f}",
            f"{report.largest_error:.3g}",
            f"{report.relative:.2%}",
            *([report.wide] if has_wide else []),
        )
        for report in rounded
    ]
    return text_table([(*head, "8-bit blocks") if has_wide else head, *rows])
