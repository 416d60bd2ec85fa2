# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs kernels that send on four CPU devices that model TPUs, as a separate program.

    python -m tests.support.remote_dma_cases CASE MODES [FAULT]

CASE is a function below; MODES are when a copy is made: "eager", at its start, or "on_wait", at the
latest moment, or both with a comma. FAULT plants an error (see FAULTS). A case prints "as it should
be" at its end, or raises. The interpreter reports a race with the words RACE: up to jax 0.11 it
prints them and continues, from 0.12 on it raises them; `outcome` reads both. A deadlock shows as
the
caller's timeout.

It is a separate process because a kernel that waits in vain stops it, and because the interpreter
blocks threads: it needs more of them than devices, and their number is read before JAX starts.
"""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS = 4
RACE = "RACE DETECTED"
LEFT_OVER = "non-zero count"
AS_IT_SHOULD_BE = "as it should be"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a case."""

    has_passed: bool
    is_race: bool
    has_left_over: bool
    """Whether a semaphore was not waited down to 0."""
    text: str

    @property
    def is_clean(self) -> bool:
        return self.has_passed and not self.is_race and not self.has_left_over


def outcome(case: str, modes: str, fault: str = "none", timeout: float = 800) -> Outcome:
    """Run one case.

    Args:
        case: Name of a function of this module.
        modes: "eager", "on_wait" or both.
        fault: Name of a fault in FAULTS.
        timeout: Seconds after which a deadlock is assumed, and raised.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "NPROC": "32",
        # Most of the time goes into compiling the interpreter's program.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={RANKS}"
        " --xla_backend_optimization_level=0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.remote_dma_cases", case, modes, fault],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=timeout,
    )
    text = done.stdout + done.stderr
    return Outcome(
        has_passed=done.returncode == 0 and AS_IT_SHOULD_BE in text,
        is_race=RACE in text,
        has_left_over=LEFT_OVER in text,
        text=text,
    )


def transfer(run) -> None:
    """Parcels alone, in three kernels, each of which sends the arrivals of the one before."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.ring.parcel import Parcel
    from pallas_kernels.ring.step import send

    def steps(x, transport):
        found = []
        for step in range(3):
            parcels = [
                Parcel(x, tuple((i, (i + 1 + step) % RANKS) for i in range(RANKS))),
                Parcel(3 * x, tuple((i, i - 1) for i in range(1, RANKS - step))),
                Parcel(x[:3, :5].astype(jnp.bfloat16), ((0, 2), (3, 1))),
                Parcel(x, ()),
            ]
            found.append(send(parcels, "seq", transport))
            x = found[-1][0]
        return found

    x = jax.random.normal(jax.random.key(0), (RANKS * 16, 128))
    run(steps, x, kind="elementwise")


def rows(run) -> None:
    """Two rings of two ranks side by side, on a mesh with another axis."""
    import jax

    from pallas_kernels.ring.parcel import Parcel
    from pallas_kernels.ring.step import send

    def steps(x, transport):
        there = send([Parcel(x, ((0, 1), (1, 0))), Parcel(2 * x, ((1, 0),))], "seq", transport)
        return there, send([Parcel(there[0], ((0, 1),))], "seq", transport)

    run(steps, jax.random.normal(jax.random.key(0), (RANKS * 8, 128)), kind="elementwise")


def blocks(run) -> None:
    """Attention over a block, and its gradients, beside parcels of several kinds."""

    from pallas_kernels.flash_attention.api import KERNELS
    from pallas_kernels.flash_attention.kernels import AttentionOperands, OutGradient, softmax_delta
    from pallas_kernels.flash_attention.mask import Rules, Tokens
    from pallas_kernels.ring.parcel import Parcel
    from pallas_kernels.ring.step import Links, attend_and_send, differentiate_and_send

    rules = Rules(causal=True, window=None, softcap=None, scale=8**-0.5)

    def step(q, k, v, transport):
        kernels = KERNELS["pallas_tpu" if transport == "remote_dma" else "xla"]
        links = Links("seq", transport, kernels)
        operands = AttentionOperands(q, k, v, Tokens(None, None, None, None), rules)
        parcels = [
            Parcel(k, tuple((i, (i + 1) % RANKS) for i in range(RANKS))),
            Parcel(v, ((1, 0), (3, 2))),
            Parcel(q[:, :, 0, 0], ((0, 2),)),
        ]
        state, arrived = attend_and_send(operands, parcels, links)
        delta = softmax_delta(state.out, state.out)
        gradient = OutGradient(state.out, state.lse, delta)
        gradients, again = differentiate_and_send(operands, gradient, parcels, links)
        return state, arrived, gradients, again

    run(step, *_heads(), kind="attention")


def ring(run) -> None:
    """Both passes as one kernel each, with documents; two heads, one after the other."""
    _ring(run, *_heads())


def ring_of_tiles(run) -> None:
    """The same with two sequences, values of another width, and several padded blocks."""
    from pallas_kernels.flash_attention.tpu import blocks as pallas_tpu_blocks

    pallas_tpu_blocks.TABLE = ((256, (128, 128)),)
    q, k, v = _heads(sequences=2, tokens=160)
    _ring(run, q, k, v[..., :5])


def _ring(run, q, k, v) -> None:
    import jax
    import jax.numpy as jnp

    from pallas_kernels.flash_attention import xla
    from pallas_kernels.flash_attention.kernels import AttentionOperands, OutGradient, softmax_delta
    from pallas_kernels.flash_attention.mask import Rules, Tokens
    from pallas_kernels.ring.remote_dma.ring_backward import differentiate_ring
    from pallas_kernels.ring.remote_dma.ring_forward import attend_ring
    from pallas_kernels.sequence_layout import sequence_order

    rules = Rules(causal=True, window=None, softcap=20.0, scale=8**-0.5)
    order = sequence_order(q.shape[1], RANKS, "zigzag")
    positions = jnp.stack([jnp.asarray(order, jnp.int32)] * len(q))
    segment_ids = positions // (50 + 13 * jnp.arange(len(q))[:, None])

    def whole(q, k, v, positions, segment_ids, transport):
        gather = functools.partial(jax.lax.all_gather, axis_name="seq", axis=1, tiled=True)
        if transport == "remote_dma":
            tokens = Tokens(positions, positions, segment_ids, segment_ids)
            operands = AttentionOperands(q, k, v, tokens, rules)
            out, lse = attend_ring(operands, axis_name="seq")
            gradient = OutGradient(out, lse, softmax_delta(out, out))
            return out, lse, *differentiate_ring(operands, gradient, axis_name="seq")
        tokens = Tokens(positions, gather(positions), segment_ids, gather(segment_ids))
        operands = AttentionOperands(q, gather(k), gather(v), tokens, rules)
        out, lse = xla.attend(operands)
        gradient = OutGradient(out, lse, softmax_delta(out, out))
        d_q, *d_keys = xla.differentiate(operands, gradient)
        scatter = functools.partial(jax.lax.psum_scatter, axis_name="seq", tiled=True)
        return out, lse, d_q, *(scatter(x, scatter_dimension=1) for x in d_keys)

    run(whole, q, k, v, positions, segment_ids, kind="attention")


def ring_attention(run) -> None:
    """Values and gradients of the operation: one kernel forward, one per step backward."""
    from pallas_kernels import ring_attention

    _whole(run, ring_attention)


def ring_attention_by_steps(run) -> None:
    """One kernel per step in both passes: contiguous, where most keys need not go far."""
    from pallas_kernels import ring_attention

    _whole(run, ring_attention, layout="contiguous")


def ring_attention_both_ways(run) -> None:
    """Half of the heads one way round, half of them the other."""
    from pallas_kernels import ring_attention

    _whole(run, ring_attention, directions="both")


def token_ring_attention(run) -> None:
    """Queries one way, results straight home."""
    from pallas_kernels import token_ring_attention

    _whole(run, token_ring_attention)


def token_ring_attention_co_travelling(run) -> None:
    """Queries and their results together."""
    from pallas_kernels import token_ring_attention

    _whole(run, token_ring_attention, form="co_travelling", causal=False)


def _whole(run, operation, **options) -> None:
    """Return value and gradients of an operation, with packed documents."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import sequence_order

    q, k, v = _heads()
    order = sequence_order(q.shape[1], RANKS, options.get("layout", "zigzag"))
    segment_ids = jnp.asarray(order // 50, jnp.int32)[None]

    def value_and_gradients(q, k, v, weights, segment_ids, transport):
        implementation = "pallas_tpu" if transport == "remote_dma" else "xla"

        def attend(q, k, v):
            return operation(
                q,
                k,
                v,
                axis_name="seq",
                segment_ids=segment_ids,
                transport=transport,
                implementation=implementation,
                **options,
            )

        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(weights)

    weights = jax.random.normal(jax.random.key(1), q.shape)
    run(value_and_gradients, q, k, v, weights, segment_ids, kind="attention")


def _heads(sequences: int = 1, tokens: int = 32) -> list[Any]:
    """Return queries, keys and values of so many tokens on a rank."""
    import jax

    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (sequences, tokens * RANKS, heads, 8))
        for key, heads in zip(keys, (4, 2, 2), strict=True)
    ]


def _forget_arrivals() -> None:
    """Fault: no wait for arrivals."""
    from jax.experimental.pallas import tpu as pltpu

    make = pltpu.make_async_remote_copy

    def make_without(*arguments: Any) -> Any:
        copy = make(*arguments)
        return SimpleNamespace(start=copy.start, wait_send=copy.wait_send, wait_recv=lambda: None)

    pltpu.make_async_remote_copy = make_without


def _forget_meeting() -> None:
    """Fault: no wait for the other ranks, all but the first of which are late."""
    import jax

    from pallas_kernels.jax_versions import shape_varying_like
    from pallas_kernels.ring.remote_dma import transfer as module

    find_place, is_there = module.mesh_place, threading.Event()

    def come(place: Any) -> Any:
        if not place.any():
            is_there.set()
        elif is_there.wait(60):
            time.sleep(10)
        return place

    def late_place() -> Any:
        axes, place = find_place()
        kind = shape_varying_like(place.shape, place.dtype, place)
        return axes, jax.pure_callback(come, kind, place)

    module.mesh_place = late_place
    module.meet = module.part = lambda *arguments: None


def _forget_passing() -> None:
    """Fault: no wait at the end for the others to leave the barrier."""
    from pallas_kernels.ring.remote_dma import transfer as module

    module.part = lambda *arguments: None


def _forget_capacity() -> None:
    """Fault: no wait for a free slot of keys."""
    from pallas_kernels.ring.remote_dma import ring_keys

    _forget_semaphores(ring_keys)


def _forget_sums() -> None:
    """Fault: no wait for a free slot of gradients."""
    from pallas_kernels.ring.remote_dma import ring_backward

    _forget_semaphores(ring_backward)


def _forget_semaphores(module: Any) -> None:
    from jax.experimental import pallas as pl

    nothing = dict.fromkeys(("semaphore_wait", "semaphore_signal"), lambda *_, **__: None)
    module.pl = SimpleNamespace(**{**vars(pl), **nothing})


CASES = {
    case.__name__: case
    for case in (
        transfer,
        rows,
        blocks,
        ring,
        ring_of_tiles,
        ring_attention,
        ring_attention_by_steps,
        ring_attention_both_ways,
        token_ring_attention,
        token_ring_attention_co_travelling,
    )
}
FAULTS = {
    "none": lambda: None,
    "arrivals": _forget_arrivals,
    "meeting": _forget_meeting,
    "passing": _forget_passing,
    "capacity": _forget_capacity,
    "sums": _forget_sums,
}


def main(case: str, modes: Any, fault: str = "none") -> None:
    """Compare a case with XLA's collectives, the first mode with checked types."""
    import jax
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import AxisType, PartitionSpec

    from pallas_kernels.interpreter import interpret_kernels
    from tests.support.tolerances import assert_close

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    sizes = (2, RANKS // 2) if case == "rows" else (1, RANKS)
    mesh = jax.make_mesh(sizes, ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    axes = ("data", "seq")
    FAULTS[fault]()

    def run(function, *arrays, kind):
        def spread(transport, check_vma):
            def local(*arrays):
                # Every rank's results one after the other, whatever they are.
                return jax.tree.map(lambda x: x[None], function(*arrays, transport))

            axis = 0 if case in ("transfer", "rows") else 1
            return jax.jit(
                jax.shard_map(
                    local,
                    mesh=mesh,
                    in_specs=PartitionSpec(*[None] * axis, axes),
                    out_specs=PartitionSpec(axes),
                    check_vma=check_vma,
                )
            )(*arrays)

        expected = spread("ppermute", True)
        for number, mode in enumerate(modes.split(",")):
            params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
            with interpret_kernels(), pltpu.force_tpu_interpret_mode(params):
                found = jax.block_until_ready(spread("remote_dma", number == 0))
            assert_close(found, expected, kind)

    CASES[case](run)
    print(AS_IT_SHOULD_BE)


if __name__ == "__main__":
    main(*sys.argv[1:])
