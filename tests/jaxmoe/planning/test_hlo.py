# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Collectives read from HLO: every printed form, and programs with known collectives."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.planning.hlo import KINDS, collectives
from tests.support.collective_counts import counts

ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))

# Replica groups as printed, and their meaning.
GROUPS = {
    "{{0,1,2,3},{4,5,6,7}}": ROWS,
    "[2,4]<=[8]": ROWS,
    "[4,2]<=[2,4]T(1,0)": COLUMNS,
    "[2,4]<=[2,2,2]T(1,0,2)": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "mesh['a'=2,'b'=4] {'b'}": ROWS,
    "mesh['a'=2,'b'=4] {'a'}": COLUMNS,
    "mesh['a'=2,'b'=4] {'a','b'}": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "mesh['a'=2,'b'=4] {'b','a'}": ((0, 4, 1, 5, 2, 6, 3, 7),),
    "mesh['a'=2,'b'=4] {'b':(1)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['a'=2,'b'=4] {'a','b':(2)2}": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "mesh['a'=2,'one'=1,'b'=4] {'one','b'}": ROWS,
    "mesh['a'=2,'b'=4], device_ids=([7,6,5,4,3,2,1,0]) {'b'}": ((7, 6, 5, 4), (3, 2, 1, 0)),
    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh[a=2,b=4] {b}": ROWS,
    "{}": ((0, 1, 2, 3, 4, 5, 6, 7),),
}

# Instructions as printed: kind, bytes of the result, bytes of the operands.
INSTRUCTIONS = {
    "f32[64,16]{1,0} all-gather(%x), dimensions={0}": ("all-gather", 4096, 512),
    "f32[64,16]{1,0:T(8,128)(2,1)S(1)} all-gather(f32[8,16]{1,0} %x)": ("all-gather", 4096, 512),
    "(f32[8,16], f32[64,16]) all-gather-start(%x)": ("all-gather", 4096, 512),
    "((f32[8,16], bf16[8,16]), (f32[16,16], bf16[16,16])) all-gather-start(%x, %h)": (
        "all-gather",
        1536,
        768,
    ),
    "((f32[8,16]), f32[1,16]) reduce-scatter-start(%x)": ("reduce-scatter", 64, 512),
    "(f32[8,16], bf16[8,16]) all-reduce(%x, %h), to_apply=%sum": ("all-reduce", 768, 768),
    "(f32[8,16], bf16[8,16]) all-reduce-start(%x, %h)": ("all-reduce", 768, 768),
    "(f32[8,16]{1,0}, f32[8,16], /*index=2*/u32[]{:S(2)}, u32[]) collective-permute-start(%x)": (
        "collective-permute",
        512,
        512,
    ),
    "(f32[4,16], f32[4,16]) all-to-all(%half, %half)": ("all-to-all", 512, 512),
    "bf16[9,16] ragged-all-to-all(%h, %big, %n, %n, %n, %n)": ("ragged-all-to-all", 288, 256),
    "bf16[8,16] collective-broadcast(%h)": ("collective-broadcast", 256, 256),
    "s4[3,3] all-reduce(%four)": ("all-reduce", 5, 5),
    "pred[3] all-reduce(%flag)": ("all-reduce", 3, 3),
    "f8e4m3fn[3] all-reduce(%eight)": ("all-reduce", 3, 3),
    "f32[] all-reduce(%scalar)": ("all-reduce", 4, 4),
}

MODULE = """HloModule m, num_partitions=8, entry_computation_layout={{(f32[8,16])->f32[]}}

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

{computations}
ENTRY %main (x: f32[8,16]) -> f32[] {{
  %x = f32[8,16]{{1,0}} parameter(0), metadata={{op_name="all-gather(x)"}}
  %h = bf16[8,16] parameter(1)
  %half = f32[4,16] parameter(2)
  %big = bf16[9,16] parameter(3)
  %n = s32[8] parameter(4)
  %four = s4[3,3] parameter(5)
  %flag = pred[3] parameter(6)
  %eight = f8e4m3fn[3] parameter(7)
  %scalar = f32[] parameter(8)
{lines}
}}
"""


def module(*lines: str, computations: str = "") -> str:
    return MODULE.format(lines="\n".join("  " + line for line in lines), computations=computations)


@pytest.mark.parametrize("text", GROUPS)
def test_groups_in_every_form(text):
    line = f"ROOT %r = f32[8,16] all-reduce(%x), channel_id=1, replica_groups={text}, to_apply=%sum"
    assert [c.groups for c in collectives(module(line))] == [GROUPS[text]]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_mesh_groups_are_the_devices_that_differ_in_the_chosen_axes(sizes, data):
    names = "abcd"[: len(sizes)]
    chosen = data.draw(st.permutations(names).flatmap(lambda p: st.sampled_from([p, p[:1]])))
    mesh = ",".join(f"'{n}'={s}" for n, s in zip(names, sizes, strict=True))
    said = ",".join(f"'{n}'" for n in chosen)
    (found,) = collectives(
        module(f"ROOT %r = f32[8,16] all-reduce(%x), replica_groups=mesh[{mesh}] {{{said}}}")
    )
    devices = np.arange(np.prod(sizes)).reshape(sizes)
    expected = []
    rest = [n for n in names if n not in chosen]
    for others in itertools.product(*(range(sizes[names.index(n)]) for n in rest)):
        group = []
        for inner in itertools.product(*(range(sizes[names.index(n)]) for n in chosen)):
            at = dict(zip([*rest, *chosen], [*others, *inner], strict=True))
            group.append(int(devices[tuple(at[n] for n in names)]))
        expected.append(tuple(group))
    assert list(found.groups) == expected


@pytest.mark.parametrize("text", INSTRUCTIONS)
def test_bytes_of_every_form(text):
    found = collectives(module(f"ROOT %r = {text}"))
    assert [(c.kind, c.result_bytes, c.operand_bytes) for c in found] == [INSTRUCTIONS[text]]


def test_every_kind_is_among_the_forms():
    assert {kind for kind, _, _ in INSTRUCTIONS.values()} == set(KINDS)


def test_pairs_of_a_permute():
    line = "ROOT %r = f32[8,16] collective-permute(%x), source_target_pairs={{0,1},{1,0}}, a={}"
    (found,) = collectives(module(line))
    assert found.groups == ((0, 1), (1, 0))


def test_only_the_start_of_an_asynchronous_pair_counts():
    computations = """%inner (p: f32[8,16]) -> f32[64,16] {
  %p = f32[8,16] parameter(0)
  ROOT %g = f32[64,16] all-gather(%p), replica_groups=[1,8]<=[8]
}
"""
    lines = (
        "%s = ((f32[8,16]), f32[64,16], u32[]) async-start(%x), calls=%inner",
        "%u = ((f32[8,16]), f32[64,16], u32[]) async-update(%s), calls=%inner",
        "%d = f32[64,16] async-done(%u), calls=%inner",
        "%t = f32[8,16] all-reduce-start(%x), to_apply=%sum",
        "ROOT %e = f32[8,16] all-reduce-done(%t)",
    )
    found = collectives(module(*lines, computations=computations))
    assert counts(found) == {"all-gather": 1, "all-reduce": 1}


LOOP = """%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {{
  %p = (s32[], f32[8,16]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[8,16] get-tuple-element(%p), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %r = f32[8,16] all-reduce(%v), to_apply=%sum
  ROOT %t = (s32[], f32[8,16]) tuple(%next, %r)
}}

%condition (p.1: (s32[], f32[8,16])) -> pred[] {{
  %p.1 = (s32[], f32[8,16]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %bound = s32[] constant({bound})
  ROOT %lt = pred[] compare(%i.1, %bound), direction={direction}
}}
"""


def loop(start: str, *, step: int = 1, bound: int = 5, direction: str = "LT", attributes: str = ""):
    return module(
        f"%z = s32[] {start}",
        "%z.1 = s32[] copy(%z)",
        "%init = (s32[], f32[8,16]) tuple(%z.1, %x)",
        "ROOT %w = (s32[], f32[8,16]) while(%init), condition=%condition, body=%body" + attributes,
        computations=LOOP.format(step=step, bound=bound, direction=direction),
    )


@pytest.mark.parametrize(
    ("text", "trips"),
    [
        (loop("constant(0)"), 5),
        (loop("constant(2)"), 3),
        (loop("constant(0)", step=2), 3),
        (loop("constant(7)"), 0),
        (loop("parameter(9)"), None),
        (loop("constant(0)", step=0), None),
        (loop("constant(0)", direction="GT"), None),
        (loop("parameter(9)", attributes=', backend_config={"known_trip_count":{"n":"9"}}'), 9),
    ],
)
def test_loops(text, trips):
    (found,) = collectives(text)
    assert found.trip_count == trips
    if trips is None:
        with pytest.raises(
            ValueError, match=re.escape("r (all-reduce) is in a loop with an unknown trip count")
        ):
            counts([found])
    else:
        assert counts([found]) == {"all-reduce": trips}


def test_calls_and_branches_are_all_followed():
    computations = """%f (p: f32[8,16]) -> f32[8,16] {
  %p = f32[8,16] parameter(0)
  ROOT %g = f32[8,16] all-reduce(%p), to_apply=%sum
}
"""
    lines = (
        "%one = f32[8,16] call(%x), to_apply=%f",
        "%two = f32[8,16] fusion(%x), kind=kLoop, calls=%f",
        "%b = f32[8,16] conditional(%flag, %x, %x), branch_computations={%f, %f}",
        "ROOT %t = f32[8,16] conditional(%flag, %x, %x), true_computation=%f, false_computation=%f",
    )
    assert counts(collectives(module(*lines, computations=computations))) == {"all-reduce": 6}


def test_a_fused_tpu_reduce_scatter_counts_once():
    computations = """%all-reduce-scatter.1 (p: f32[9,16]) -> f32[1,16] {
  %p = f32[9,16] parameter(0)
  %g = f32[9,16] all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
  ROOT %s = f32[1,16] slice(%g), slice={[0:1], [0:16]}
}
"""
    line = "ROOT %fusion.1 = f32[1,16] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1"
    (found,) = collectives(module(line, computations=computations))
    assert (found.kind, found.name) == ("reduce-scatter", "fusion.1")
    assert (found.operand_bytes, found.result_bytes) == (576, 64)


def test_a_collective_in_several_tpu_fusions_counts_once():
    bodies = ("fused_computation.1", "async_collective_fusion.2", "fused_computation.3")
    computations = "".join(
        f"""%{body} (p{i}: f32[8,16]) -> f32[64,16] {{
  %p{i} = f32[8,16] parameter(0)
  ROOT %g{i} = f32[64,16] all-gather(%p{i}), channel_id=1, replica_groups=[1,8]<=[8]
}}
"""
        for i, body in enumerate(bodies)
    )
    names = ("async-collective-start.1", "fusion.2", "async-collective-done.1")
    lines = [
        f"%{name} = f32[64,16] fusion(%x), kind=kCustom, calls=%{body}"
        for name, body in zip(names, bodies, strict=True)
    ]
    found = collectives(module(*lines, "ROOT %r = f32[8,16] copy(%x)", computations=computations))
    assert [one.name for one in found] == ["g0"]


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("f32[64,16] all-gather(%x), replica_groups=[1,8]<=[8]", 7 * 512),
        ("f32[1,16] reduce-scatter(%x), replica_groups=[1,8]<=[8]", 7 * 64),
        ("f32[8,16] all-reduce(%x), replica_groups=[2,4]<=[8]", 2 * 3 * 128),
        ("f32[8,16] all-to-all(%x), replica_groups=[2,4]<=[8]", 3 * 128),
        ("f32[8,16] collective-permute(%x), source_target_pairs={{0,1}}", 512),
    ],
)
def test_bytes_on_the_wire(line, sent):
    (found,) = collectives(module(f"ROOT %r = {line}"))
    assert found.wire_bytes == sent


def test_groups_in_a_new_form_are_refused():
    line = "ROOT %r = f32[8,16] all-reduce(%x), replica_groups=[[0, 1]]"
    with pytest.raises(ValueError, match=r"unknown form of replica groups: '\[\[0, 1"):
        collectives(module(line))


def test_a_part_of_a_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        collectives("module @jit_f { func.func public @main() }")


def _program(x):
    """[8 16] f32 on each of 2 x 4 devices."""
    swapped = jax.lax.all_to_all(x, "b", 1, 0, tiled=True)
    whole = jax.lax.all_gather(x, ("a", "b"), axis=0, tiled=True)
    part = jax.lax.psum_scatter(whole, "b", scatter_dimension=0, tiled=True)

    def turn(carry, _):
        return jax.lax.ppermute(carry, "b", [(0, 1), (1, 0)]), None

    turned, _ = jax.lax.scan(turn, x, None, length=5)
    return jax.lax.psum(part, "a").sum() + swapped.sum() + turned.sum()


# Kind: bytes of the result, of the operands, groups, executions.
_DOES = {
    "all-gather": (4096, 512, ((0, 1, 2, 3, 4, 5, 6, 7),), 1),
    "all-reduce": (1024, 1024, COLUMNS, 1),
    "all-to-all": (512, 512, ROWS, 1),
    "collective-permute": (512, 512, ((0, 1), (1, 0), (4, 5), (5, 4)), 5),
    "reduce-scatter": (1024, 4096, ROWS, 1),
}


def does(text: str) -> dict:
    return {
        c.kind: (c.result_bytes, c.operand_bytes, c.groups, c.trip_count) for c in collectives(text)
    }


@pytest.mark.parametrize("axes", ["x", "z", "zx", "yx"])
def test_groups_of_a_compiled_program_are_the_rows_of_the_mesh(axes):
    mesh = jax.make_mesh((2, 2, 2), tuple("xyz"))
    spread, whole = (NamedSharding(mesh, PartitionSpec(names)) for names in (tuple(axes), None))
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=spread)
    text = jax.jit(lambda x: x, out_shardings=whole).lower(x).compile().as_text()
    order = [a for a in "xyz" if a not in axes] + list(axes)
    rows = np.arange(8).reshape(2, 2, 2).transpose(["xyz".index(a) for a in order])
    (found,) = collectives(text)
    assert found.groups == tuple(map(tuple, rows.reshape(-1, 2 ** len(axes)).tolist()))


def test_lowered_and_compiled_programs_have_the_same_collectives():
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    spec = PartitionSpec(("a", "b"), None)
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, spec))
    run = jax.shard_map(
        _program, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
    )
    lowered = jax.jit(run).lower(x)
    for text in (lowered.as_text("hlo"), lowered.compile().as_text()):
        assert len(collectives(text)) == len(_DOES)
        assert does(text) == _DOES
