# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws a model, a training setup and a mesh of 8 devices, and compares two steps with one device.

Loss, balance losses, gradient norm, load, telemetry, updated parameters and router state must be
equal within rounding. A draw that cannot run must be refused in words before anything is traced.
Where a value differs by more, the steps are run again on one device with parameters changed in
their last bits: what moves as much by that is decided by rounding (a tie of a router), and counts
as `unstable` instead of a difference.

To add a choice: its draw in `tests/fuzz/meshes.py`, in the function of its subject; of pipelines in
`tests/fuzz/stages.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxmoe.contrib.few_bits.halo import HaloConfig
from jaxmoe.contrib.token_routes.least_loaded import LeastLoadedConfig
from jaxmoe.data import Batch, MarkovConfig
from jaxmoe.execution import ExecutionConfig, KernelsConfig, OffloadConfig, Remat
from jaxmoe.models.config import (
    AttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    YarnConfig,
)
from jaxmoe.optim import OPTIMIZERS, LinearConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.routing import BALANCERS, GATES, METHODS, CapacityConfig, SoftmaxGateConfig
from jaxmoe.run.assemble import Assembly, assemble
from jaxmoe.run.config import EvaluationConfig, PretrainConfig, TrainingConfig
from jaxmoe.run.plan import RunPlan, make_plan
from jaxmoe.scaling import PARAMETERIZATIONS
from jaxmoe.training import MaskedDiffusionConfig, NextTokenConfig
from jaxmoe.training.guard import GuardConfig
from jaxmoe.training.state import state_around
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig, MoEMesh
from sharding.distributed import global_batch
from sharding.expert_parallel import (
    AllGatherConfig,
    AllToAllConfig,
    LocalConfig,
)
from sharding.sequence_parallel import (
    AllGatherKVConfig,
    AutoSequenceParallelConfig,
    NoSequenceParallelConfig,
    RingConfig,
    TokenRingConfig,
    UlyssesConfig,
    UlyssesRingConfig,
)
from sharding.state_layouts import STATE_LAYOUTS
from tests.fuzz.frozen import draw_frozen, freeze
from tests.fuzz.outcome import Outcome, is_likely, pick, refusal
from tests.fuzz.stages import SHARE, draw_stages
from tests.support.routers import ROUTER_CASES
from tests.support.tolerances import TOLERANCES

STEPS = 2
AXES = ("replica", "data", "expert", "seq", "tensor")
DISPATCHERS = (
    LocalConfig(),
    AllGatherConfig(),
    AllToAllConfig(),
    AllToAllConfig(num_chunks=2, experts_keep="inputs"),
    LeastLoadedConfig(borrowed=1, threshold=1.0, min_rows=1),
)
FORMS = (
    AllGatherKVConfig(),
    AllGatherKVConfig(layout="contiguous"),
    UlyssesConfig(),
    UlyssesConfig(num_chunks=2),
    UlyssesRingConfig(),
    UlyssesRingConfig(),
    RingConfig(),
    RingConfig(layout="document_zigzag", directions="both"),
    TokenRingConfig(),
    TokenRingConfig(layout="contiguous", form="co_travelling"),
    AutoSequenceParallelConfig(),
)
OPTIMIZER_OF = {
    **dict.fromkeys(("standard", "completep", "mup", "mup_plus_plus"), ("adamw",)),
    **dict.fromkeys(("mup_muon", "mup_plus_plus_muon"), ("muon",)),
    **dict.fromkeys(("hyperp", "muonh_vanilla"), ("muonh",)),
}
"""Optimisers of a parameterisation; the others are refused by a test of their own."""


def check(rng: np.random.Generator, place: pathlib.Path, *, staged: float = SHARE) -> Outcome:
    """Compare a drawn setup on its mesh with one device.

    Args:
        rng: Generator of the draw.
        place: Empty directory; unused.
        staged: Share of the draws that have stages.
    """
    del place
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # advice on combinations
        try:
            # Most choices do not fit: one is drawn that does, but for a share of the indices.
            is_fitting = is_likely(rng, 0.85)
            config = draw_until_accepted(rng, staged) if is_fitting else draw(rng, staged)
            assembly = assemble(config)
        except ValueError as error:
            return Outcome("refused", refusal(error))
        roles = draw_frozen(rng.spawn(1)[0], assembly.plan.table)
        print(describe(config) + f", frozen {', '.join(roles)}" * bool(roles), flush=True)
        return compare(assembly, Reference(assembly, rng, roles), roles)


class Reference:
    """Steps of a run on one device that computes plainly."""

    def __init__(
        self,
        assembly: Assembly,
        rng: np.random.Generator,
        roles: tuple[str, ...] = (),
        num_steps: int = STEPS,
    ):
        """Take the model, the rows and new parameters of a run.

        Args:
            assembly: Run on a mesh.
            rng: Generator of the parameters.
            roles: Roles that are not trained.
            num_steps: Number of steps.
        """
        config = assembly.plan.config
        self.config = dataclasses.replace(config, execution=on_one_device(config.execution))
        self.rows = [assembly.loader.batch(step) for step in range(num_steps)]
        plan = freeze(make_plan(self.config), roles)
        self.params = parameters(plan, rng)
        self._steps = Steps(plan, self.config.execution, None)
        self._rng = rng
        self._moves: list[dict[str, Any]] = []

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        """Metrics of the steps, and what they end with."""
        results = self._steps.run(self.params, self.rows)
        assert np.isfinite(results["metrics"][0]["loss"]), "the loss of one device is not finite"
        return results

    def moves(self) -> Iterator[dict[str, Any]]:
        """Yield how far four changes of the parameters, in more and more bits, move the results."""
        epsilon = 2.0**-9 if is_narrow(self.config) else 2.0**-20
        for doubled in range(4):  # a mesh rounds sums elsewhere, by more than a value is rounded
            if doubled == len(self._moves):
                params = nudged(self.params, self._rng, epsilon * 2.0**doubled)
                results = self._steps.run(params, self.rows)
                errors = differences(results, self.results, self.config, is_whole=True)
                self._moves.append({name: error for name, (error, _) in errors.items()})
            yield self._moves[doubled]


def compare(assembly: Assembly, reference: Reference, roles: tuple[str, ...] = ()) -> Outcome:
    """Compare steps of a run on its mesh with those of one device that computes plainly.

    Args:
        assembly: Run on its mesh.
        reference: The same run on one device.
        roles: Roles that are not trained.

    Raises:
        AssertionError: A value differs by more than rounding explains.
    """
    steps = Steps(freeze(assembly.plan, roles), assembly.execution, assembly.mesh)
    results = steps.run(reference.params, reference.rows)
    errors = differences(results, reference.results, assembly.plan.config)
    far = {name: pair for name, pair in errors.items() if pair[0] > pair[1]}
    if not far:
        return Outcome("equal")
    unstable = far
    for moves in reference.moves():
        far = {
            name: (error, bound)
            for name, (error, bound) in far.items()
            if error > max(bound, 8.0 * moves[name])
        }
    if far:
        lines = [f"  {name}: {error:.3g}, allowed {b:.3g}" for name, (error, b) in far.items()]
        raise AssertionError("\n".join(["differs from one device:", *lines[:40]]))
    name, (error, bound) = max(unstable.items(), key=lambda item: item[1][0] / item[1][1])
    return Outcome("unstable", f"{len(unstable)} values, {name} {error:.3g} > {bound:.3g}")


# Draws.


def draw_until_accepted(rng: np.random.Generator, staged: float) -> PretrainConfig:
    """Return the first of up to 40 draws that can be assembled, or one more."""
    for _ in range(40):
        try:
            config = draw(rng, staged)
            assemble(config)
            return config
        except ValueError as error:
            refusal(error)
    return draw(rng, staged)


def draw(rng: np.random.Generator, staged: float) -> PretrainConfig:
    """Return a training run of a few thousand parameters, in a share of the draws with stages.

    Raises:
        ValueError: The choices do not fit each other.
    """
    execution = draw_execution(rng)
    model = draw_model(rng)
    is_diffusion = not model.attention.is_causal
    parameterization = pick(rng, sorted(PARAMETERIZATIONS))
    fitting = OPTIMIZER_OF.get(parameterization, sorted(OPTIMIZERS))
    optimizer = OPTIMIZERS[pick(rng, fitting)]()
    if hasattr(optimizer, "epsilon"):  # at 1e-8 noise has a sign
        optimizer = dataclasses.replace(optimizer, epsilon=1e-2)
    training = TrainingConfig(
        steps=8,
        batch_size=pick(rng, (8, 16, 16, 32)),
        sequence_length=pick(rng, (8, 16, 16, 16, 20, 24)),
        accumulation=pick(rng, (1, 1, 2)),
        accumulated_balance=pick(rng, ("buffer", "two_pass")),
        clip=pick(rng, (None, 1.0)),
        guard=GuardConfig(max_norm_ratio=None),
        objective=MaskedDiffusionConfig() if is_diffusion else NextTokenConfig(),
    )
    config = PretrainConfig(
        model=model,
        data=MarkovConfig(order=1, vocab_size=16),
        training=training,
        optimizer=optimizer,
        schedule=LinearConfig(warmup_steps=1),
        parameterization=PARAMETERIZATIONS[parameterization](),
        execution=execution,
        evaluation=EvaluationConfig(batches=1, batch_size=8),
    )
    return draw_stages(rng.spawn(1)[0], config, staged)


def draw_execution(rng: np.random.Generator) -> ExecutionConfig:
    """Return a layout of 8 devices."""
    sizes = dict.fromkeys(AXES, 1)
    for _ in range(3):
        sizes[pick(rng, AXES)] *= 2
    fold = None
    if is_likely(rng, 0.3):
        sizes["data"], sizes["expert"] = sizes["data"] * sizes["expert"], 1
        fold = MoEMesh(
            expert=pick(rng, (1, 2, 4, 8)),
            expert_tensor=pick(rng, (1, 1, 2)),
            seq_inner=pick(rng, (1, 2)) if sizes["seq"] > 1 else 1,
        )
    is_cut = sizes["seq"] > 1
    form = pick(rng, FORMS) if is_cut else NoSequenceParallelConfig()
    if form.name == "usp" and is_likely(rng, 0.9):
        fold = dataclasses.replace(fold or MoEMesh(), seq_inner=form.ulysses)
        sizes["data"], sizes["expert"] = sizes["data"] * sizes["expert"], 1
    return ExecutionConfig(
        mesh=MeshConfig(**sizes),
        fold=fold,
        rules=pick(rng, tuple(STATE_LAYOUTS)),
        dispatcher=pick(rng, DISPATCHERS),
        sequence_parallel=form,
        kernels=draw_kernels(rng),
        precision=draw_precision(rng),
        remat=pick(rng, get_args(Remat)),
        offload=pick(rng, (None, None, None, OffloadConfig())),
        unroll=pick(rng, (1, 1, 2)),
        telemetry=pick(rng, ("brief", "detailed")),
        loss_chunk=pick(rng, (0, 0, 3, 8)),
    )


def draw_kernels(rng: np.random.Generator) -> KernelsConfig:
    if is_likely(rng, 0.8):
        return KernelsConfig()
    return KernelsConfig(attention=pick(rng, (None, "reference", "xla")))


def draw_precision(rng: np.random.Generator) -> PrecisionPolicy:
    if is_likely(rng, 0.75):
        return PrecisionPolicy(compute="float32")
    if is_likely(rng, 0.3):
        return PrecisionPolicy(compute="float32", matmul=HaloConfig(block=8))
    return PrecisionPolicy(
        compute="bfloat16", parameters=pick(rng, ("float32", "float32", "bfloat16"))
    )


def draw_model(rng: np.random.Generator) -> ModelConfig:
    moe = draw_moe(rng)
    is_causal = is_likely(rng, 0.9) if moe is None else moe.router.traits.is_causal
    num_layers = pick(rng, (1, 1, 1, 2))
    mixer = draw_mixer(rng, is_causal)
    layers, dense = (), ()
    if is_likely(rng, 0.3):
        layers = tuple(
            LayerConfig(mixer=draw_mixer(rng, is_causal) if is_likely(rng, 0.5) else None)
            for _ in range(pick(rng, range(1, num_layers + 1)))
        )
    if moe is not None and num_layers > 1 and is_likely(rng, 0.4):
        dense = (int(rng.integers(num_layers)),)
    return ModelConfig(
        vocab_size=32,
        num_layers=num_layers,
        embed_dim=pick(rng, (16, 32)),
        attention=mixer,
        moe=moe,
        dense_layers=dense,
        dense_dim=pick(rng, (16, 24, 32)),
        layers=layers,
        has_tied_embeddings=is_likely(rng, 0.3),
    )


def draw_mixer(rng: np.random.Generator, is_causal: bool) -> Any:
    if is_likely(rng, 0.25):
        yarn = YarnConfig(factor=2.0, original_length=8) if is_likely(rng, 0.3) else None
        return LatentAttentionConfig(
            num_heads=pick(rng, (4, 8)),
            latent_dim=pick(rng, (8, 16)),
            query_latent_dim=pick(rng, (None, 8)),
            nope_dim=pick(rng, (4, 8)),
            rope_dim=pick(rng, (2, 4)),
            value_dim=8,
            rope_layout=pick(rng, ("interleaved", "halves")),
            yarn=yarn,
            is_causal=is_causal,
        )
    heads = pick(rng, (4, 8, 8))
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=pick(rng, (heads, heads, heads // 2)),
        head_dim=8,
        qk_norm=pick(rng, ("none", "head", "full")),
        is_gated=is_likely(rng, 0.3),
        window=pick(rng, (None, None, None, 5)),
        softcap=pick(rng, (None, None, 5.0)),
        is_causal=is_causal,
    )


def draw_moe(rng: np.random.Generator) -> MoEConfig | None:
    if is_likely(rng, 0.05):
        return None
    experts = pick(rng, (4, 6, 8, 8))
    sizes = {
        "num_experts": experts,
        "expert_dim": pick(rng, (8, 16, 24)),
        "num_shared_experts": pick(rng, (0, 0, 1, 2)),
    }
    if is_likely(rng, 0.25):
        method = METHODS[pick(rng, sorted(METHODS))]
        top_k = pick(rng, (1, 2, 3))
        method = method.sized_for(steps=4, rows_per_expert=8 * top_k / experts)
        return MoEConfig(**sizes, **method.parts(), top_k=top_k)
    cases = ROUTER_CASES[pick(rng, tuple(ROUTER_CASES))]
    case = pick(rng, cases)
    names = rng.permutation(sorted(BALANCERS))[: rng.integers(3)]
    is_own = case.config.traits.has_own_gates or is_likely(rng, 0.2)
    return MoEConfig(
        **sizes,
        router=case.config,
        top_k=min(case.top_k, experts),
        gate=SoftmaxGateConfig() if is_own else GATES[pick(rng, sorted(GATES))](),
        balancers=tuple(BALANCERS[name]() for name in names),
        capacity=CapacityConfig(factor=pick(rng, (0.8, 1.5))) if is_likely(rng, 0.1) else None,
    )


# Runs.


def on_one_device(execution: ExecutionConfig) -> ExecutionConfig:
    """Return the plain execution with the same precision, telemetry and nothing else."""
    return ExecutionConfig(
        mesh=MeshConfig(), precision=execution.precision, telemetry=execution.telemetry
    )


def parameters(plan: RunPlan, rng: np.random.Generator) -> Any:
    """Return parameters of which none has the value of a fresh model."""

    def value(row: Any) -> np.ndarray:
        std = max(row.init_std, 0.1)
        return std * rng.standard_normal(row.shape) + (row.declaration.init == "ones")

    dtype = plan.config.execution.precision.parameter_dtype
    return plan.table.tree(lambda row: value(row).astype(np.float32).astype(dtype))


def nudged(params: Any, rng: np.random.Generator, epsilon: float) -> Any:
    """Return parameters that differ in their last bits."""

    def nudge(leaf: np.ndarray) -> np.ndarray:
        wide = leaf.astype(np.float32)
        return (wide * (1.0 + epsilon * rng.standard_normal(leaf.shape))).astype(leaf.dtype)

    return jax.tree.map(nudge, params)


class Steps:
    """The compiled steps of a plan on a mesh, or on one device without a mesh."""

    def __init__(self, plan: RunPlan, execution: ExecutionConfig, mesh: Any):
        training = plan.config.training
        self.plan, self.execution, self.mesh = plan, execution, mesh
        self.step = make_train_step(
            plan.model,
            plan.optimizer,
            execution=execution,
            max_norm_ratio=training.step_guard.max_norm_ratio,
            table=plan.table,
            **training.step_options(),
        )
        self.begin = jax.jit(
            lambda params: state_around(
                plan.model,
                plan.optimizer,
                execution,
                params,
                jax.random.key(7),
                training.step_gradients,
                training.step_parts,
            )
        )

    def run(self, params: Any, rows: list[Batch]) -> dict[str, Any]:
        """Return metrics of every step, and the parameters and router state after the last."""
        mesh = self.mesh
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            if mesh is not None:
                places = self.plan.table.tree(lambda row: NamedSharding(mesh, row.spec))
                params = jax.device_put(params, places)
            else:
                params = jax.tree.map(jax.numpy.asarray, params)
            state, metrics = self.begin(params), []
            for batch in rows:
                state, measured = self.step(
                    state, batch if mesh is None else global_batch(batch, mesh)
                )
                metrics.append(
                    {
                        field.name: getattr(measured, field.name)
                        for field in dataclasses.fields(measured)
                    }
                )
            ends = {"params": state.params, "router_state": state.router_state}
            return jax.device_get({"metrics": metrics, **ends})


def is_narrow(config: PretrainConfig) -> bool:
    """Return whether products are rounded to fewer bits than float32 has."""
    precision = config.execution.precision
    return precision.compute == "bfloat16" or precision.matmul.name != "full"


def differences(
    found: dict[str, Any], wanted: dict[str, Any], config: PretrainConfig, *, is_whole: bool = False
) -> dict[str, tuple[float, float]]:
    """Return (error, bound) of every array; above its bound it differs by more than rounding.

    The error is the largest |found - wanted| - rtol |wanted|, without the last term if `is_whole`,
    and infinite where one is not finite; the bound is atol times the largest |wanted|, at least 1.
    In 8 bits only losses are compared: blocks are rounded as devices hold them.
    """
    rtol, atol = TOLERANCES["bfloat16" if is_narrow(config) else "float32", "end_to_end"].values()
    rtol = 0.0 if is_whole else rtol
    ours, structure = jax.tree.flatten_with_path(found)
    theirs, other = jax.tree.flatten(wanted)
    if structure != other:
        raise AssertionError(f"other names than on one device: {structure} is not {other}")
    pairs = {}
    for (path, value), expected in zip(ours, theirs, strict=True):
        name = jax.tree_util.keystr(path)
        if config.execution.precision.matmul.name != "full" and not name.endswith("['loss']"):
            continue
        value, expected = (np.asarray(x).astype(np.float64) for x in (value, expected))
        assert value.shape == expected.shape, f"{name}: {value.shape} is not {expected.shape}"
        is_number = np.isfinite(expected)
        bound = atol * max(1.0, np.abs(expected).max(initial=0.0, where=is_number))
        with np.errstate(invalid="ignore"):  # of what is infinite in both
            error = np.abs(value - expected) - rtol * np.abs(expected)
        worst = error.max(initial=0.0, where=is_number)
        if not np.array_equal(value[~is_number], expected[~is_number], equal_nan=True):
            worst = np.inf
        pairs[name] = (float(worst) if np.isfinite(worst) else np.inf, float(bound))
    return pairs


def describe(config: PretrainConfig) -> str:
    """Return a line that names the choices of a draw."""
    model, execution, training = config.model, config.execution, config.training
    moe = model.moe
    sizes = {axis: size for axis, size in execution.mesh.by_axis.items() if size > 1}
    parts = [
        "dense" if moe is None else f"{moe.router.name} K={moe.top_k} E={moe.num_experts}",
        "" if moe is None else "+".join(balancer.name for balancer in moe.balancers),
        model.attention.name,
        f"layers={model.num_layers}",
        f"{sizes}" if execution.fold is None else f"{sizes} fold={execution.fold}",
        f"{execution.pipeline_order} {execution.kernels}" if execution.mesh.stage > 1 else "",
        execution.rules,
        execution.dispatcher.name,
        execution.sequence_parallel.name,
        f"remat={execution.remat} chunk={execution.loss_chunk} {execution.telemetry}",
        f"{execution.precision.compute}/{execution.precision.matmul.name}",
        f"B={training.batch_size} S={training.sequence_length} parts={training.accumulation}",
        training.accumulated_balance,
        config.optimizer.name,
        config.parameterization.name,
    ]
    return ", ".join(part for part in parts if part)
