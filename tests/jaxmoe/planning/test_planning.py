# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans against real states, brute force and lowered programs."""

from __future__ import annotations

import dataclasses
import itertools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.optim import AdamWConfig
from jaxmoe.optim.schedules import LinearConfig
from jaxmoe.planning.abstract_step import (
    StepPlan,
    abstract_batch,
    abstract_state,
)
from jaxmoe.planning.corrections.measured import measured_chip
from jaxmoe.planning.device_bytes import device_bytes, padded_bytes
from jaxmoe.planning.hardware import CHIPS, Chip, parse_topology
from jaxmoe.planning.memory import estimate_memory, least_memory
from jaxmoe.planning.mesh_axes import axes_of_groups
from jaxmoe.planning.search import Space, enumerate_meshes, on_mesh, remedies, search
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.step_time import executed_flops, predict_time
from jaxmoe.planning.traffic import step_traffic
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import init_state
from sharding import axes as ax
from sharding.axes import MESH_AXES
from sharding.expert_parallel import AllToAllConfig
from sharding.mesh import MeshConfig, make_mesh
from tests.support.abstract_lowering import lower_abstractly
from tests.support.models import TINY

EIGHT = MeshConfig(data=8)
WIDE = ModelConfig(
    vocab_size=512,
    num_layers=2,
    embed_dim=256,
    attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=64),
    moe=MoEConfig(num_experts=8, top_k=2, expert_dim=128),
)


def plan_of(model=TINY, mesh=EIGHT, *, batch_size=8, length=8, **fields) -> StepPlan:
    policy = PrecisionPolicy(compute=fields.pop("compute", "float32"))
    execution = ExecutionConfig(mesh=mesh, precision=policy, **fields)
    table = parameter_table(model, rules=execution.axis_rules)
    return StepPlan(
        model=model,
        table=table,
        optimizer=AdamWConfig().build(table, LinearConfig(warmup_steps=0).build(10)),
        optimizer_config=AdamWConfig(),
        execution=execution,
        batch_size=batch_size,
        sequence_length=length,
    )


@pytest.mark.parametrize(
    "mesh", [MeshConfig(data=8), MeshConfig(data=2, expert=4), MeshConfig(data=4, tensor=2)]
)
def test_experts_of_all_devices_receive_the_rows_of_the_batch(mesh):
    """Rows times the hidden units of an expert on a device; 64 tokens."""
    sizes = Sizes.of(plan_of(mesh=mesh))
    hidden = 1 / sizes.shards(ax.EXPERT_MLP)
    assert 8 * sizes.balanced_rows() * hidden == 64 * TINY.moe.top_k


@pytest.mark.parametrize(
    "mesh, rules",
    [
        pytest.param(MeshConfig(data=8), "fully_sharded", marks=pytest.mark.slow),
        (MeshConfig(data=8), "zero1"),
        (MeshConfig(replica=2, data=2, tensor=2), "hybrid"),
    ],
)
def test_arguments_are_those_of_a_real_state(mesh, rules, key):
    plan = plan_of(mesh=mesh, rules=rules)
    real = make_mesh(mesh)
    state = init_state(plan.model, plan.optimizer, key, execution=plan.execution, mesh=real)
    leaves = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves(state)
    ]
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    memory = estimate_memory(plan, "cpu")
    assert memory.parameters + memory.optimizer + memory.other_state == held
    # And shape by shape, spec by spec.
    shapes = jax.tree.map(
        lambda x: (x.shape, x.dtype, NamedSharding(real, x.sharding.spec)),
        abstract_state(plan, real),
    )
    wanted = jax.tree.map(
        lambda x: (x.shape, x.dtype, NamedSharding(real, getattr(x.sharding, "spec", _NONE))), state
    )
    for mine, other in zip(jax.tree.leaves(shapes), jax.tree.leaves(wanted), strict=True):
        if isinstance(mine, NamedSharding):
            assert mine.is_equivalent_to(other, 5)
        else:
            assert mine == other


_NONE = PartitionSpec()


@pytest.mark.parametrize(
    "shape, values",
    [
        ((), 128),
        ((2,), 128),
        ((2048,), 2048),
        ((1, 4096), 4096),
        ((4, 128), 512),
        ((4, 32), 512),
        ((256, 32), 8192),
        ((48, 8, 4, 128), 48 * 8 * 4 * 128),
        ((4, 8, 192, 32), 4 * 8 * 32 * 256),
        ((8, 64, 63), 63 * 8 * 128),
        ((8, 63, 1, 1), 8 * 128),
        ((4, 32, 4, 32), 4 * 32 * 4 * 128),
    ],
)
def test_tiles_of_a_tpu(shape, values):
    """As compiled programs of libtpu 0.0.52 have them, in float32."""
    assert padded_bytes(shape, 4) == 4 * values


def test_bytes_of_sharded_shapes():
    plan = plan_of(batch_size=16)
    batch = jax.tree.leaves(abstract_batch(plan, plan.mesh))
    assert device_bytes(batch, "cpu") == 3 * 2 * 8 * 4
    assert device_bytes(batch, "tpu") == 3 * 2 * 128 * 4


MESHES_OF_8 = list(enumerate_meshes(8))


def test_all_meshes_of_a_number():
    assert len(set(MESHES_OF_8)) == len(MESHES_OF_8) == 20  # 3 factors of 2 in 4 places
    assert all(math.prod(mesh.sizes) == 8 for mesh in MESHES_OF_8)
    assert [m.sizes for m in enumerate_meshes(6, seq=4)] == []


@hypothesis.settings(max_examples=4)
@hypothesis.given(
    memory=st.floats(0.35, 1.5),
    bandwidth=st.sampled_from([1e6, 1e9]),
    flops=st.sampled_from([1e9, 1e12]),
)
def test_the_search_equals_brute_force(memory, bandwidth, flops):
    plan = plan_of(WIDE, batch_size=8, length=64)
    everything = _brute_force(plan)
    chip = dataclasses.replace(
        CHIPS["cpu"],
        memory=int(memory * max(need for _, need in everything.values())),
        link_bandwidth=bandwidth,
        far_bandwidth=bandwidth,
        flops=flops,
    )
    found = search(plan, MESHES_OF_8, chip, keep=2)
    times = {
        mesh: predict_time(own, chip).step
        for mesh, (own, need) in everything.items()
        if need <= chip.available
    }
    assert len(found.fitting) == min(2, len(times))
    assert len(found.refused) == len(MESHES_OF_8) - len(everything)
    if times:
        assert found.fitting[0].time.step == min(times.values())
    else:
        assert found.closest is not None
        assert found.closest.memory.total == min(need for _, need in everything.values())


_KNOWN: dict[MeshConfig, tuple[StepPlan, float]] = {}


def _brute_force(plan):
    if not _KNOWN:
        for data, tensor, expert in itertools.product((1, 2, 4, 8), repeat=3):
            replica, rest = divmod(8, data * tensor * expert)
            if rest or not replica or tensor > 4:
                continue  # four key and value heads
            mesh = MeshConfig(replica=replica, data=data, tensor=tensor, expert=expert)
            own = on_mesh(plan, mesh)
            _KNOWN[mesh] = own, estimate_memory(own, "cpu").total
    return _KNOWN


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.0])
def test_the_search_over_micro_batches_equals_brute_force(share):
    plan = plan_of(WIDE, batch_size=64, length=256)
    meshes = [MeshConfig(data=8), MeshConfig(data=4, tensor=2), MeshConfig(expert=8)]
    needs = {
        (mesh, number): (predict_time(own, CHIPS["cpu"]).step, estimate_memory(own, "cpu").total)
        for mesh in meshes
        for number in (1, 2, 4, 8, 16)
        if 64 % (number * mesh.batch_shards) == 0
        for own in [dataclasses.replace(on_mesh(plan, mesh), accumulation=number)]
    }
    sizes = sorted(need for _, need in needs.values())
    memory = int(sizes[0] + share * (sizes[-1] - sizes[0])) + 1
    chip = dataclasses.replace(CHIPS["cpu"], memory=memory)
    # The plan's own number is one of those that are tried.
    own = dataclasses.replace(plan, accumulation=4)
    found = search(own, meshes, chip, keep=3, space=Space(has_micro_batches=True))
    fitting = [
        min(
            (time for (mesh, _), (time, need) in needs.items() if mesh == one and need <= memory),
            default=math.inf,
        )
        for one in meshes
    ]
    assert [one.time.step for one in found.fitting] == [
        time for time in sorted(fitting) if math.isfinite(time)
    ]
    kept = search(own, meshes, chip, keep=3)
    assert {one.plan.accumulation for one in kept.fitting} <= {4}


def test_remedies_when_nothing_fits():
    plan = plan_of(WIDE, batch_size=16, length=1024)
    small: Chip = dataclasses.replace(CHIPS["cpu"], memory=1)
    found = search(plan, [MeshConfig(data=8)], small)
    assert found.closest is not None and not found.fitting
    ways = remedies(found.closest, small)
    assert "--execution.remat full" in ways and "--training.accumulation 2" in ways
    assert all(need < found.closest.memory.total for need in ways.values())


def test_state_in_host_memory_comes_to_the_device_in_parts():
    """Counters stay; the rest arrives for the update, at once or three parts at a time."""
    fields = {"mesh": MeshConfig(data=8), "batch_size": 8, "length": 64}
    device = estimate_memory(plan_of(WIDE, **fields), "tpu")
    whole = estimate_memory(plan_of(WIDE, **fields, offload=OffloadConfig()), "tpu")
    cut = plan_of(WIDE, **fields, offload=OffloadConfig(parts=12))
    moments = device.optimizer - whole.optimizer
    assert moments > 0.9 * device.optimizer
    assert whole.update - device.update == moments
    assert estimate_memory(cut, "tpu").update - device.update == pytest.approx(moments / 4)


REMATS = ("none", "dots", "kernels", "attention", "full")


def test_each_remat_keeps_less_and_computes_more_than_the_one_before():
    plans = [plan_of(WIDE, batch_size=8, length=64, remat=remat) for remat in REMATS]
    saved = [estimate_memory(plan, "tpu").saved for plan in plans]
    flops = [executed_flops(Sizes.of(plan)) for plan in plans]
    assert saved == sorted(set(saved), reverse=True)
    assert flops[0] == flops[1] and flops[1:] == sorted(set(flops[1:]))
    # All but the last product of an expert, whose result nothing of the backward pass reads.
    layers = plans[0].model.stacks[0].path
    of_layer = Sizes.of(plans[0]).layout.flops.by_stack[layers]
    assert of_layer.again("full") == pytest.approx((of_layer.total - of_layer.experts / 3) / 3)
    assert of_layer.again("kernels") == pytest.approx(of_layer.products / 3)


def test_an_unrolled_loop_saves_on_a_cpu_whatever_remat_says():
    """What compiled programs do: 64.9, 61.2 and 59.8 MB of the tiny recipe with "none", "full" and
    "dots" on eight devices with experts over four, where a loop took 48.2 and 23.7."""

    def saved(platform, **fields):
        plan = plan_of(WIDE, mesh=MeshConfig(replica=2, data=1, expert=4), **fields)
        return estimate_memory(plan, platform).saved

    spread = {"dispatcher": AllToAllConfig()}
    loops = [saved("cpu", remat=remat, **spread) for remat in ("none", "dots", "full")]
    assert loops[0] > loops[1] > loops[2]
    unrolled = [saved("cpu", remat=remat, unroll=2, **spread) for remat in ("none", "dots", "full")]
    assert min(unrolled) == max(unrolled) > loops[0]
    assert saved("gpu", remat="full", unroll=2, **spread) == loops[2]
    whole = saved("cpu")
    rows = saved("cpu", unroll=2) - whole
    assert 0 < rows < 0.2 * whole, "rows are kept; nothing else is ready early beside whole experts"


def test_parameters_in_host_memory_leave_three_layers_on_the_device():
    """Parameters, gradients and copies for products of the others leave it."""
    model = dataclasses.replace(WIDE, num_layers=12)
    fields = {"mesh": MeshConfig(data=8), "batch_size": 8, "length": 64, "remat": "full"}
    device = estimate_memory(plan_of(model, **fields), "tpu")
    plan = plan_of(model, **fields, offload=OffloadConfig(parameters="host", parts=12))
    host = estimate_memory(plan, "tpu")
    layers = device.parameters - host.parameters
    assert layers > 0.8 * device.parameters
    assert host.arriving == pytest.approx(3 * layers / 12)
    assert host.gradients < 0.2 * device.gradients and host.copies == 0.0
    found = search(plan_of(model, **fields), [MeshConfig(data=8)], tiny := small_chip("v5e"))
    assert found.closest is not None
    ways = remedies(found.closest, tiny)
    assert any("--execution.offload.parameters host" in flag for flag in ways)


def small_chip(name):
    return dataclasses.replace(CHIPS[name], memory=1)


def test_a_mesh_that_does_not_divide_is_refused_with_its_reason():
    plan = plan_of(WIDE, batch_size=4, length=64)
    found = search(plan, [MeshConfig(tensor=8), MeshConfig(data=8)], CHIPS["cpu"])
    assert "'kv_heads' of size 4 must be divisible by mesh.tensor=8" in found.refused["tensor=8"]
    assert "training.batch_size=4 must be divisible by the 8" in found.refused["data=8"]


def test_predicted_time_is_flat_from_16_to_256_chips():
    """At fixed tokens per chip: FLOPs are the same, bytes grow by (n - 1) / n alone."""
    sent, flops, held = [], [], []
    for devices in (16, 256):
        plan = plan_of(WIDE, MeshConfig(data=devices), batch_size=devices, length=64)
        sent.append(sum(one.bytes for one in step_traffic(plan)))
        flops.append(predict_time(plan, CHIPS["v5e"]).compute)
        held.append(estimate_memory(plan, "tpu").experts)
    assert flops[0] == flops[1] and held[0] == held[1]
    assert sent[1] == pytest.approx(sent[0] * (255 / 256) / (15 / 16), rel=0.02)


def test_gradients_of_a_layer_that_are_reduced_together_are_one_message():
    """Norms and routers of a few kilobytes: latency counts once for a layer, not for each array."""
    plan = plan_of(WIDE, MeshConfig(data=8), batch_size=8, length=64)
    small = [row for row in plan.table if not any(row.spec)]
    (found,) = (one for one in step_traffic(plan) if one.reason == "gradients of copies")
    held = sum(row.size for row in small)
    itemsize = jnp.dtype(plan.execution.precision.compute_dtype).itemsize
    assert found.bytes == pytest.approx(2 * 7 / 8 * held * itemsize)
    of_layers = [row for row in small if row.declaration.axes[:1] == ("layers",)]
    alone = {row.path.partition("/")[0] for row in small if row not in of_layers}
    assert len(of_layers) > 2
    assert found.messages == 2 * 7 * (of_layers[0].shape[0] + len(alone))


def test_bytes_of_fully_sharded_parameters_by_hand():
    """Gathered forward, and where layers are recomputed; scattered once."""
    plan = plan_of(WIDE, MeshConfig(data=8), batch_size=8, length=64)
    cut = sum(row.size for row in plan.table if any(row.spec))
    embedding = head = 512 * 256  # the gradient of the embedding needs no values of it
    by_reason = {one.reason: one.bytes for one in step_traffic(plan)}
    assert by_reason["weights"] == pytest.approx(7 / 8 * 4 * (cut + head))
    again = plan_of(WIDE, MeshConfig(data=8), batch_size=8, length=64, remat="full")
    recomputed = {one.reason: one.bytes for one in step_traffic(again)}["weights"]
    assert recomputed == pytest.approx(7 / 8 * 4 * (2 * cut - embedding))
    assert by_reason["gradients"] == pytest.approx(7 / 8 * 4 * cut)
    whole = sum(row.size for row in plan.table) - cut
    assert by_reason["gradients of copies"] == pytest.approx(2 * 7 / 8 * 4 * whole)


def test_bytes_of_moved_tokens_are_those_of_one_row_each():
    """There and back, forward and backward, beside the rows of their K experts."""
    config = AllToAllConfig(token_tables="tables.npz")
    plan = plan_of(WIDE, MeshConfig(expert=8), batch_size=8, length=64, dispatcher=config)
    by_reason = {one.reason: one.bytes for one in step_traffic(plan)}
    assert by_reason["shuffle"] == 2 * 2 * WIDE.num_layers * 7 / 8 * 64 * WIDE.embed_dim * 4
    assert by_reason["rows"] == 2 * by_reason["shuffle"]


def test_compute_is_model_flops():
    plan = plan_of(WIDE, MeshConfig(data=8), batch_size=8, length=64)
    per_token = flops_per_token(plan.model, plan.table, 64)
    time = predict_time(plan, dataclasses.replace(CHIPS["cpu"], flops=1.0))
    assert time.compute * 0.6 == pytest.approx(per_token * 64)
    assert time.overlap_bound <= time.step


@hypothesis.given(chosen=st.sets(st.sampled_from(MESH_AXES[2:]), min_size=1))
def test_axes_of_groups(chosen):
    mesh = dict(zip(MESH_AXES, (1, 1, 2, 3, 2, 4), strict=True))
    places = np.arange(48).reshape(tuple(mesh.values()))
    along = [i for i, axis in enumerate(mesh) if axis in chosen]
    others = [i for i in range(6) if i not in along]
    groups = places.transpose(others + along).reshape(-1, math.prod(places.shape[i] for i in along))
    found = axes_of_groups(tuple(map(tuple, groups.tolist())), mesh)
    assert found == tuple(axis for axis in mesh if axis in chosen)


def test_axes_of_a_permutation_and_of_everyone():
    mesh = {"data": 2, "tensor": 2}
    assert axes_of_groups(((0, 1), (1, 0), (2, 3), (3, 2)), mesh) == ("tensor",)
    assert axes_of_groups((), mesh) == ("data", "tensor")
    assert axes_of_groups(((0, 9),), mesh) == ()


def test_a_step_for_4096_devices_lowers():
    mesh = MeshConfig(replica=16, data=64, tensor=4)
    plan = plan_of(WIDE, mesh, batch_size=1024, length=64, compute="bfloat16", remat="full")
    text = lower_abstractly(plan, "tpu").as_text()
    assert "mhlo.num_partitions = 4096" in text
    # The kernels of a TPU, chosen on a CPU: attention, and both kernels of its gradient.
    assert text.count("stablehlo.custom_call @tpu_custom_call") >= 3


@pytest.mark.parametrize(
    "text, devices, kind",
    [
        ("tpu:v5e:16x16", 256, "v5e"),
        ("gpu:h100:16", 16, "h100"),
        ("gpu:mi250x:16", 16, "mi250x"),
        ("gpu:mi300x:8", 8, "mi300x"),
        ("cpu:8", 8, "cpu"),
    ],
)
def test_topologies_parse(text, devices, kind):
    topology = parse_topology(text)
    assert (topology.num_devices, topology.kind) == (devices, kind)
    assert 0 < topology.chip.available <= topology.chip.memory


@pytest.mark.parametrize(
    "text, wrap",
    [
        ("tpu:v5p:4x4x8", (True, True, True)),
        ("tpu:v5p:2x4x4", (False, False, False)),
        ("tpu:v5e:16x16", (True, True, False)),
        ("tpu:v5e:8x16", (False, True, False)),
        ("tpu:v6e:4x4", (False, False, False)),
    ],
)
def test_compiler_is_told_which_rings_are_closed(text, wrap):
    """Without, a gather over a whole v5p is compiled as an all-reduce of twice the bytes."""
    assert parse_topology(text).compiler_options["wrap"] == wrap


def test_bandwidth_falls_with_the_reach_of_a_group():
    chip = CHIPS["mi250x"]
    assert [chip.bandwidth(reach) for reach in (2, 3, 8, 9)] == [200e9, 50e9, 50e9, 25e9]
    assert chip.memory == 64 * 2**30 and chip.flops == 191.5e12
    assert [CHIPS["h100"].bandwidth(reach) for reach in (2, 8, 16)] == [450e9, 450e9, 50e9]
    assert CHIPS["v5e"].bandwidth(256) == CHIPS["v5e"].link_bandwidth


def test_v4_has_one_device_for_a_chip():
    assert parse_topology("tpu:v4:4x4x4").compiler_options["chip_config_name"] == "megacore"
    assert "chip_config_name" not in parse_topology("tpu:v5e:4x4").compiler_options


@pytest.mark.parametrize(
    "text, words",
    [
        ("tpu:v5:16x16", "there is no TPU 'v5': did you mean 'v5p'?; known are v4, v5e,"),
        (
            "tpu:v5p:16x16",
            "'16x16': give 3 whole numbers joined by x, such as tpu:v5p:4x4x4",
        ),
        ("tup:v5e:4x4", "'tup' is not a platform: did you mean 'tpu'?; known are tpu:v4"),
        ("tpu:v9", "there is no TPU 'v9'; known are v4, v5e, v5p, v6e, tpu7x, such as tpu:v5e:"),
        ("tpu:v5e", "has no size: give 2 whole numbers joined by x, such as tpu:v5e:16x16"),
        ("gpu:h100:12", "12 GPUs do not fill hosts of 8"),
        ("cpu:0", "has the size '0': give 1 whole number, such as cpu:8"),
        ("v5e", "known are tpu:v4:4x4x4"),
    ],
)
def test_an_unknown_topology_is_refused(text, words):
    with pytest.raises(ValueError, match="topology=") as caught:
        parse_topology(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("overlap", [0.0, 0.1, 0.5, 1.0])
def test_measured_step_gives_back_the_efficiency(overlap):
    plan = plan_of(WIDE, MeshConfig(data=4, tensor=2), batch_size=8, length=64)
    chip = dataclasses.replace(CHIPS["cpu"], overlap=overlap)
    slower = dataclasses.replace(chip, efficiency=0.31, memory_bandwidth=1e15)
    seconds = predict_time(plan, slower).step
    assert measured_chip(chip, plan, seconds).efficiency == pytest.approx(0.31)
    with pytest.raises(ValueError, match="was the run on other devices than topology"):
        measured_chip(chip, plan, predict_time(plan, chip).all_communication / 10)


def test_overlap_hides_gathers_and_reductions_alone():
    """Up to the share of the products; messages that products wait for are never hidden."""
    plan = plan_of(WIDE, MeshConfig(data=4, tensor=2), batch_size=8, length=64)
    chip = CHIPS["h100"]
    nothing = predict_time(plan, chip)
    work, reasons = max(nothing.compute, nothing.memory), nothing.communication
    free = sum(one for name, one in reasons.items() if name.startswith(("weights", "gradients")))
    waited = sum(one for name, one in reasons.items() if name.startswith("tensor"))
    assert free > 0 < waited and free + waited == pytest.approx(nothing.all_communication)
    assert nothing.hidden == 0.0 and nothing.step == work + nothing.all_communication
    enough = predict_time(plan, dataclasses.replace(chip, overlap=2 * free / work))
    assert enough.step == pytest.approx(work + waited)
    little = predict_time(plan, dataclasses.replace(chip, overlap=free / work / 4))
    assert little.step == pytest.approx(work + waited + 0.75 * free)


def test_loops_that_a_gpu_unrolls_by_itself_keep_the_rows_of_experts():
    """Up to four layers leave no loop there, unless all of a layer is computed again."""

    def saved(layers, platform, **fields):
        model = dataclasses.replace(WIDE, num_layers=layers)
        plan = plan_of(model, mesh=MeshConfig(data=8), length=128, **fields)
        return least_memory(Sizes.of(plan), platform).saved

    for layers, is_unrolled in ((2, True), (4, True), (5, False), (8, False)):
        whole, loop = saved(layers, "gpu", unroll=layers), saved(layers, "gpu", unroll=1)
        assert whole > loop
        assert saved(layers, "gpu") == (whole if is_unrolled else loop)
        assert saved(layers, "tpu") == saved(layers, "tpu", unroll=1)
    assert saved(4, "gpu", remat="full") == saved(4, "gpu", remat="full", unroll=1)
