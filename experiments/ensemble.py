# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates runs on parts of the data as an ensemble, routed by the partition of the data.

    jaxmoe pretrain languages --data.partition.part 1/2 --run.name part1
    jaxmoe pretrain languages --data.partition.part 2/2 --run.name part2
    jaxmoe ensemble --runs runs/pretrain/part1 runs/pretrain/part2

Each run was trained alone, on documents of its part. Every token is predicted by the members whose
parts the text before it is closest to:

    p(y | x) = sum_k p(k | x) p_k(y | x),   p(k | x) = softmax(-|e - c_k|^2 / T)

with e the hashed 1- and 2-grams of the text so far and c_k the centroids. T is chosen on the last
quarter of the held-out batches, which is not scored, unless it is given. Members, their mean and
the routed mixture are compared on the same held-out tokens. A run on all of the data is compared by
`jaxmoe evaluate --batches`, with as many batches as the table names.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from experiments.cli import flags
from experiments.cli.exit import run_command
from experiments.cli.exit_codes import ExitCode
from experiments.cli.output import announce, say
from experiments.cli.process import start_process
from experiments.cli.tables import text_table
from jaxmoe.contrib.ensembles.evaluate import EnsembleResult, check_router, evaluate_ensemble
from jaxmoe.contrib.ensembles.members import EnsembleMembers, open_members
from jaxmoe.errors import configuration_errors
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporting.compare import shortest_names
from jaxmoe.tracking.plots import BLUE, GRAY, ORANGE, figure_of_panels, save_figure
from sharding.mesh import MeshConfig

_WIDEST_NAME = 48


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EnsembleRunConfig:
    """Destination of the comparison."""

    directory: str | None = None
    """Directory of summary.json and plots; runs/ensemble/<names> when None."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EnsembleConfig:
    """Members of an ensemble, and how they are mixed."""

    runs: tuple[str, ...] = ()
    """Run directories of the members, trained with data.partition.part 1/4, 2/4 and so on."""
    top: int = 2
    """Members that are used per token, the likeliest by the text before it."""
    temperature: float | None = None
    """Temperature of the router; chosen on held-out batches that are not scored when None."""
    batches: int | None = None
    """Number of held-out batches; that of the first run when None."""
    mesh: MeshConfig | None = None
    """Mesh to use; that of each run when None."""
    run: EnsembleRunConfig = EnsembleRunConfig()
    """Destination of the comparison."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prog = "jaxmoe ensemble"
    config = flags.parse_flags(EnsembleConfig(), argv, prog, __doc__ or "")
    with flags.exit_on_bad_configuration():
        start_process()
        if not config.runs:
            raise ValueError(
                "no run is given: name the run directories of the members, such as --runs"
                " runs/pretrain/part1 runs/pretrain/part2"
            )
        check_router(config.top, config.temperature)
        names = shortest_names(config.runs)
        default = "_".join(name.replace(os.sep, "-") for name in names)[:80]
        target = RunDirectory(config.run.directory or f"runs/ensemble/{default}")
        target.check_free_of_runs()
        announce(f"evaluating {len(names)} runs: reading checkpoints, compiling ...")
        with configuration_errors():
            members = open_members(config.runs, batches=config.batches, mesh=config.mesh)
            result = evaluate_ensemble(members, top=config.top, temperature=config.temperature)
        with target.held(), target.usable():
            _draw(target, result)
            target.write_summary(_summary(config, members, result))
    say(_page(config, names, members, result))
    return int(ExitCode.DONE)


def _per_byte(members: EnsembleMembers, bits: float | None) -> float | None:
    """Return bits per byte of text; None where tokens are not text."""
    if bits is None or members.bytes_per_token is None:
        return None
    return bits / members.bytes_per_token


def _page(
    config: EnsembleConfig, names: Sequence[str], members: EnsembleMembers, result: EnsembleResult
) -> str:
    """Return the table of members and mixtures, and what they were measured on."""

    def line(name: str, part: str, step: str, weight: str, bits: float) -> list[str]:
        per_byte = _per_byte(members, bits)
        cells = [f"{bits:.4f}"] + ([] if per_byte is None else [f"{per_byte:.4f}"])
        return [_shorten(name), part, step, weight, *cells]

    heads = ["model", "part", "step", "weight", "bits/token"]
    lines = [heads + ([] if members.bytes_per_token is None else ["bits/byte"])]
    for name, member, bits, weight in zip(
        names, members.members, result.member_bits, result.member_weights, strict=True
    ):
        lines.append(line(name, str(member.partition), str(member.step), f"{weight:.1%}", bits))
    lines.append(line("uniform ensemble", "", "", "", result.uniform_bits))
    lines.append(line(f"ensemble, top {config.top}", "", "", "", result.routed_bits))
    chosen = "given"
    if result.num_calibration:
        chosen = f"chosen on {result.num_calibration} other batches"
    gain = min(result.member_bits) - result.routed_bits
    notes = [
        f"{result.num_tokens} held-out tokens of {result.num_scored} batches;"
        f" temperature {result.temperature:.3g}, {chosen}",
        f"ensemble - best member: {-gain:+.4f} bits/token",
    ]
    if members.entropy_floor is not None:
        notes.append(f"exact entropy of the data: {members.entropy_floor:.4f} bits/token")
    return "\n".join([text_table(lines), "", *notes])


def _shorten(name: str) -> str:
    """Return the end of a name that is too wide for the table."""
    return name if len(name) <= _WIDEST_NAME else f"...{name[3 - _WIDEST_NAME :]}"


def _summary(
    config: EnsembleConfig, members: EnsembleMembers, result: EnsembleResult
) -> dict[str, Any]:
    """Return the content of summary.json."""
    values = {
        "best_member": min(result.member_bits),
        "uniform": result.uniform_bits,
        "ensemble": result.routed_bits,
    }
    return {
        "status": "done",
        "tokens": result.num_tokens,
        "batches": result.num_scored,
        "calibration_batches": result.num_calibration,
        "temperature": result.temperature,
        "top": config.top,
        "centroids": members.clusters.digest(),
        "entropy_bits_per_token": members.entropy_floor,
        **{f"{name}_bits_per_token": bits for name, bits in values.items()},
        **{f"{name}_bits_per_byte": _per_byte(members, bits) for name, bits in values.items()},
        "members": [
            {
                "directory": member.path,
                "part": str(member.partition),
                "step": member.step,
                "weight": weight,
                "bits_per_token": bits,
                "bits_per_byte": _per_byte(members, bits),
            }
            for member, bits, weight in zip(
                members.members, result.member_bits, result.member_weights, strict=True
            )
        ],
        "positions": [dataclasses.asdict(each) for each in result.positions],
    }


def _draw(target: RunDirectory, result: EnsembleResult) -> None:
    """Draw the loss over the position in the document."""
    figure, (axes,) = figure_of_panels(width=6.0, height=3.6)
    places = [(each.first + each.last) / 2 + 1 for each in result.positions]
    for label, color, values in (
        ("best member", GRAY, [each.member for each in result.positions]),
        ("uniform ensemble", ORANGE, [each.uniform for each in result.positions]),
        ("ensemble", BLUE, [each.routed for each in result.positions]),
    ):
        axes.plot(places, values, color=color, marker="o", ms=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of the document seen")
    axes.set_ylabel("held-out bits per token")
    axes.legend(loc="best", frameon=False, fontsize=8)
    save_figure(figure, target.plots_directory / "positions.png")


if __name__ == "__main__":
    run_command(main)
