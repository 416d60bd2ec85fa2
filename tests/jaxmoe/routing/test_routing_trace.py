# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routing traces: the file, what is counted in it, and the recording of a model's choices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.routing import (
    ExpertChoiceConfig,
    HashConfig,
    RouterInputs,
    SoftmaxGateConfig,
    SoftMoEConfig,
)
from jaxmoe.routing.telemetry.recording import record_router
from jaxmoe.routing.telemetry.trace import RoutingTrace, load_trace, save_trace
from jaxmoe.run.measures import record_trace
from sharding.distributed import global_batch
from tests.support.meshes import MESHES, mesh_named
from tests.support.models import MOE, TINY
from tests.support.one_step import batch, params_of

HASHED = dataclasses.replace(
    TINY, moe=dataclasses.replace(MOE, router=HashConfig(), balancers=(), gate=SoftmaxGateConfig())
)


def hand_drawn():
    """Three tokens, two layers, K = 2, E = 3; the last slot of the last token is empty."""
    ids = [[[0, 1], [2, 0], [1, 2]], [[0, 2], [2, 1], [1, 3]]]
    return RoutingTrace(np.array([5, 1, 5]), np.array(ids), 3)


def test_trace_counts():
    trace = hand_drawn()
    assert trace.loads().tolist() == [[2, 2, 2], [1, 2, 2]]
    # 0 0: token 0; 0 1: token 1; 0 2: tokens 0 and 1; 1 0, 1 2: token 0; 1 1, 2 1: ...
    assert trace.affinity().tolist() == [[[1, 1, 2], [1, 1, 1], [0, 2, 1]]]
    assert trace.vocab_size == 6
    assert trace.by_token(1, 6)[[1, 5]].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert trace.part(1, 3).loads().tolist() == [[1, 1, 2], [0, 2, 1]]


@pytest.mark.parametrize("num_experts", [3, 300])
def test_file_round_trip(tmp_path, num_experts):
    ids = np.random.default_rng(0).integers(num_experts + 1, size=(2, 9, 2))
    trace = RoutingTrace(np.arange(9) * 1000, ids, num_experts)
    save_trace(tmp_path / "new" / "trace.npz", trace)
    again = load_trace(tmp_path / "new" / "trace.npz")
    np.testing.assert_array_equal(again.token_ids, trace.token_ids)
    np.testing.assert_array_equal(again.expert_ids, trace.expert_ids)
    assert again.num_experts == num_experts
    with np.load(tmp_path / "new" / "trace.npz") as file:
        np.testing.assert_array_equal(file["counts"], trace.loads())
        assert file["expert_ids"].itemsize == (1 if num_experts < 256 else 2)


def test_experts_of_every_token_are_recorded():
    """The record equals the known choice of hash routing; padding is left out."""
    rows = batch()
    trace = record_trace(
        HASHED, ExecutionConfig(), params_of(HASHED), initial_router_state(HASHED), [rows]
    )
    is_real = rows.segment_ids.ravel() != 0
    np.testing.assert_array_equal(trace.token_ids, rows.tokens.ravel()[is_real])
    assert not is_real.all()
    ids = jnp.asarray(trace.token_ids, jnp.int32)
    blank = jnp.zeros((len(ids), 1))
    inputs = RouterInputs(x=blank, token_mask=ids >= 0, segment_ids=ids, context={"tokens": ids})
    sizes = {"num_experts": 4, "top_k": 2, "train": False, "key": None}
    wanted = HashConfig().choose(inputs, **sizes)
    np.testing.assert_array_equal(trace.expert_ids, np.stack([wanted] * 2))


def test_trace_on_a_mesh_equals_one_device_and_is_limited():
    given = (params_of(TINY), initial_router_state(TINY))
    rows = batch()
    alone = record_trace(TINY, ExecutionConfig(), *given, [rows, rows], most_tokens=60)
    assert (
        alone.num_tokens == 60 and alone.token_ids[:4].tolist() == alone.token_ids[44:48].tolist()
    )
    name = "replica2_data2_expert2"
    execution, mesh = ExecutionConfig(mesh=MESHES[name]), mesh_named(name)
    with jax.set_mesh(mesh):
        placed = jax.device_put(given, jax.sharding.NamedSharding(mesh, jax.P()))
        spread = record_trace(TINY, execution, *placed, [global_batch(rows, mesh)])
    assert len(set(alone.expert_ids[0].ravel())) > 1
    np.testing.assert_array_equal(spread.expert_ids, alone.expert_ids[:, : spread.num_tokens])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RoutingTrace(np.arange(1), np.full((1, 1, 1), 5), 4),
            "expert ids lie in 5 to 5, and must in 0 to 4, where 4 means none",
        ),
        (lambda: load_trace("nowhere.npz"), "nowhere.npz is not a routing trace"),
        (
            lambda: record_trace(
                dataclasses.replace(TINY, moe=None), ExecutionConfig(), {}, {}, []
            ),
            "no MoE layer",
        ),
        *(
            (
                lambda router=router: record_router(
                    dataclasses.replace(MOE, router=router, gate=SoftmaxGateConfig(), balancers=()),
                    8,
                ),
                f"moe.router={router.name}: a routing trace is of tokens that choose experts",
            )
            for router in (ExpertChoiceConfig(), SoftMoEConfig())
        ),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_file_of_another_kind_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", load=np.zeros(3))
    with pytest.raises(ValueError, match="other.npz is not a routing trace"):
        load_trace(tmp_path / "other.npz")
    (tmp_path / "words.npz").write_text("words")
    with pytest.raises(ValueError, match="words.npz is not a routing trace"):
        load_trace(tmp_path / "words.npz")
    parts = {"token_ids": np.arange(3), "expert_ids": np.zeros((1, 2, 1)), "num_experts": 4}
    np.savez(tmp_path / "torn.npz", **parts)
    with pytest.raises(ValueError, match=r"token_ids \(3,\) must be \[T\]"):
        load_trace(tmp_path / "torn.npz")
