# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares training with products in 8 bits and in full precision, on the same batches.

    jaxmoe precision [--seeds 8] [--steps 500] [--arms full int8-2 float8-1]

An arm is `full`, or the dtype and the level of HALO (`jaxmoe/precision.py`); level 0 does not
rotate. Every arm has the same initial values and batches, seed by seed. Compared are the held-out
loss in nats per token, evaluated in the arm's precision, with the 95% interval of the paired
difference to `full`; and the gradient of one batch at the end of the last run in full precision:
the distance of each arm's gradient, per parameter, relative to its norm.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cli.output import say
from experiments.cli.tables import paired_interval, text_table
from experiments.studies.data import digest_of
from experiments.studies.programs import StudyPrograms
from experiments.studies.study import StudyRunConfig, StudyStoppedError, run_study
from experiments.studies.trials import TrialsFile, train
from jaxmoe.contrib.few_bits.halo import HaloConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.precision import FullPrecisionConfig, MatmulConfig, PrecisionPolicy
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.assemble import Assembly, assemble
from jaxmoe.run.config import EvaluationConfig, PretrainConfig, TrainingConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.training.evaluate import evaluate
from jaxmoe.training.loss import forward_and_nll

ARMS: dict[str, MatmulConfig] = {
    "full": FullPrecisionConfig(),
    **{f"int8-{level}": HaloConfig(dtype="int8", level=level) for level in (0, 1, 2)},
    **{f"float8-{level}": HaloConfig(dtype="float8_e4m3fn", level=level) for level in (0, 1, 2)},
}

FREE_FIELDS = ("run", "arms", "seeds")
"""Fields that may change when the same directory is continued."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Arms, length and number of the trainings."""

    run: StudyRunConfig = StudyRunConfig()
    """Run directory and name of the study."""
    arms: tuple[str, ...] = ("full", "int8-2", "float8-1", "int8-0")
    """Names of ARMS; the others are compared with the first."""
    seeds: int = 8
    """Trainings per arm; each has its own initial values and order of data."""
    steps: int = 500
    """Steps of each training."""
    width: int = 64
    """Model width D, which is the experts' width too."""
    batch_size: int = 8
    """Sequences per step, of 64 tokens each."""

    def __post_init__(self):
        for field in ("seeds", "steps", "width", "batch_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if wrong := [arm for arm in self.arms if arm not in ARMS]:
            raise ValueError(f"arms: there is no {', '.join(wrong)}; there are {', '.join(ARMS)}")
        if len(set(self.arms)) != len(self.arms) or len(self.arms) < 2:
            raise ValueError(f"arms={' '.join(self.arms)}: name two or more, each once")


def short() -> PrecisionConfig:
    """Four arms, eight seeds, 500 steps."""
    return PrecisionConfig()


RECIPES = {"short": short}


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    return run_study("precision", RECIPES, argv, __doc__ or "", PrecisionStudy, free=FREE_FIELDS)


class PrecisionStudy:
    """The trials of one directory, those of earlier starts included: one per arm and seed."""

    def __init__(self, config: PrecisionConfig, directory: RunDirectory):
        self._config = config
        self._directory = directory
        self._programs: dict[str, StudyPrograms] = {}
        self._params: Any = None
        self._stop: StopRequest | None = None
        self._data = digest_of([self._assemble(0).source])
        self._file = TrialsFile(directory.trials_file)
        self._nats = {(r["arm"], r["seed"]): r["nats"] for r in self._file.read(self._data)}

    def _assemble(self, seed: int) -> Assembly:
        return assemble(recipe(self._config, seed))

    def run(self, stop: StopRequest) -> str:
        """Train every missing arm and seed; return the status."""
        self._stop = stop
        for seed in range(self._config.seeds):
            for arm in self._config.arms:
                if (arm, seed) in self._nats:
                    continue
                try:
                    params, nats = self._train(arm, seed)
                except StudyStoppedError:
                    return str(stop.reason)
                if (arm, seed) == (self._config.arms[0], self._config.seeds - 1):
                    self._params = params
                self._nats[arm, seed] = nats
                self._file.append({"arm": arm, "seed": seed, "nats": nats, "data": self._data})
                say(f"seed {seed}  {arm}: {nats:.4f} nats per token")
        return stop.reason or "done"

    def write(self, status: str, seconds: float) -> str:
        """Write summary.json; return the tables as text."""
        summary: dict[str, Any] = {"status": status, "wall_seconds": seconds}
        if status != "done":
            self._directory.write_summary(summary)
            return f"{status}: the same command continues"
        first, *remaining = self._config.arms
        seeds = range(self._config.seeds)
        nats = {arm: [self._nats[arm, seed] for seed in seeds] for arm in self._config.arms}
        pairs = {arm: np.subtract(nats[arm], nats[first]).tolist() for arm in remaining}
        params = self._last_params()
        run = self._assemble(self._config.seeds - 1)
        with jax.set_mesh(run.mesh):
            errors = {arm: gradient_errors(run, params, first, arm) for arm in remaining}
        summary |= {
            "nats": nats,
            "differences": {arm: list(paired_interval(pair)) for arm, pair in pairs.items()},
            "gradient_errors": errors,
        }
        self._directory.write_summary(summary)
        return as_text(summary)

    def _last_params(self) -> Any:
        """Return the parameters of the first arm's last seed; train it if an earlier start did."""
        if self._params is None:
            self._params, _ = self._train(self._config.arms[0], self._config.seeds - 1)
        return self._params

    def _train(self, arm: str, seed: int) -> tuple[Any, float]:
        """Return the trained parameters of one arm and seed, and their held-out loss."""
        run = self._assemble(seed)
        with jax.set_mesh(run.mesh):
            if arm not in self._programs:
                self._programs[arm] = _programs(run, arm)
            programs = self._programs[arm]
            key = jax.random.key(run.plan.config.training.seed)
            assert self._stop is not None
            state, _ = train(programs, key, run.feed.batches(0), self._stop)
            held_out = evaluate(programs.evaluate, state.params, state.router_state, run.held_out())
        return state.params, held_out.nats_per_token


def recipe(config: PrecisionConfig, seed: int) -> PretrainConfig:
    """Return the config of one seed, in full precision.

    Args:
        config: Sizes of the run.
        seed: Seed of initial values and data.
    """
    heads = max(1, config.width // 32)
    return PretrainConfig(
        model=ModelConfig(
            num_layers=2,
            embed_dim=config.width,
            attention=AttentionConfig(num_heads=heads, num_kv_heads=heads, head_dim=32),
            moe=MoEConfig(num_experts=4, top_k=2, expert_dim=config.width),
        ),
        training=TrainingConfig(
            seed=seed, steps=config.steps, batch_size=config.batch_size, sequence_length=64
        ),
        optimizer=AdamWConfig(learning_rate=5e-3),
        schedule=LinearConfig(warmup_steps=min(20, config.steps // 5), floor=0.02),
        execution=ExecutionConfig(unroll=2),
        evaluation=EvaluationConfig(batches=32),
    )


def gradient_errors(run: Assembly, params: Any, first: str, arm: str) -> dict[str, float]:
    """Return |gradient - reference| / |reference| on the first batch, by parameter.

    Args:
        run: Assembly with model and data.
        params: Parameters at which gradients are taken.
        first: Arm of the reference.
        arm: Arm to compare.
    """
    batch = run.feed.batch(0)

    def gradient(arm: str) -> Any:
        def loss(params: Any) -> jax.Array:
            nll, output = forward_and_nll(run.plan.model, _execution(run, arm), params, batch)
            return nll / jnp.sum(jnp.asarray(batch.loss_weights)) + sum(output.losses.values())

        return jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params))

    errors = {}
    for (path, ours), (_, theirs) in zip(gradient(arm), gradient(first), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        stacked = "blocks" in name
        pairs = zip(ours, theirs, strict=True) if stacked else [(ours, theirs)]
        for layer, (layer_gradient, reference) in enumerate(pairs):
            error = jnp.linalg.norm(layer_gradient - reference) / jnp.linalg.norm(reference)
            errors[f"{name} [{layer}]" if stacked else name] = float(error)
    return errors


def as_text(summary: dict[str, Any]) -> str:
    """Return the numbers as two tables."""
    first, *remaining = summary["nats"]
    lines = [("arm", "nats per token", f"to {first}", "95%")]
    for arm, values in summary["nats"].items():
        mean, half = summary["differences"].get(arm, (0.0, None))
        width = "" if half is None else f"+- {half:.4f}"
        lines.append((arm, f"{np.mean(values):.4f}", f"{mean:+.4f}", width))
    errors = summary["gradient_errors"]
    table = [("error of the gradient", *remaining)]
    table += [
        (name, *(f"{errors[arm][name]:.3f}" for arm in remaining)) for name in errors[remaining[0]]
    ]
    return f"{text_table(lines)}\n\n{text_table(table)}"


def _execution(run: Assembly, arm: str) -> ExecutionConfig:
    return dataclasses.replace(run.execution, precision=PrecisionPolicy(matmul=ARMS[arm]))


def _programs(run: Assembly, arm: str) -> StudyPrograms:
    return StudyPrograms(
        run.plan.model,
        run.plan.optimizer,
        run.feed.batch(0),
        training=run.plan.config.training,
        objective=run.plan.config.training.objective,
        execution=_execution(run, arm),
        parameterization=run.plan.parameterization,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
