# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes read from HLO: loops, products, slices, on-chip memory, collectives in flight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.planning.hlo import collectives
from jaxmoe.planning.hlo.text import parse_module
from jaxmoe.planning.hlo.work import convolution_flops, work


def compiled(function, *shapes):
    """Work and XLA's costs of a program on f32 arrays of these shapes."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = jax.jit(function).lower(*arguments).compile()
    return work(program.as_text() or ""), program.cost_analysis() or {}


def test_a_product_counts_as_often_as_its_loop_turns():
    def product(x, w):
        return jnp.tanh(x @ w)

    def repeated(x, w):
        return jax.lax.scan(lambda x, _: (product(x, w), None), x, None, length=7)[0]

    (one, _), (seven, costs) = (compiled(f, (64, 32), (32, 32)) for f in (product, repeated))
    flops = 2 * 64 * 32 * 32
    assert (one.product_flops, seven.product_flops) == (flops, 7 * flops)
    assert costs["flops"] < 2.5 * flops, "XLA counts the loop once"
    # Each turn reads x and w and writes x at least.
    assert seven.bytes_accessed >= 7 * 4 * (2 * 64 * 32 + 32 * 32)


def test_bytes_of_a_program_without_loops_are_those_of_the_cost_analysis():
    found, costs = compiled(lambda x, y: jnp.tanh(x) * y + 1.0, (128, 64), (128, 64))
    assert found.bytes_accessed == costs["bytes accessed"]


def entry(*lines: str, computations: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    head = f"HloModule m, num_partitions=8\n\n{computations}\n"
    return f"{head}ENTRY %main () -> f32[8] {{\n{body}\n}}\n"


BIG = "%x = f32[64,1024] parameter(0)"


@pytest.mark.parametrize(
    ("lines", "moved"),
    [
        ("ROOT %y = f32[64,1024] negate(%x)", 2 * 4 * 64 * 1024),
        ("ROOT %y = f32[64,1024]{1,0:T(8,128)S(1)} negate(%x)", 4 * 64 * 1024),
        ("ROOT %y = f32[65536] bitcast(%x)", 0),
        ("ROOT %y = f32[1,1024] dynamic-slice(%x, %i, %i)", 2 * 4 * 1024),
        ("ROOT %y = f32[64,1024] dynamic-update-slice(%x, %row, %i, %i)", 2 * 4 * 1024),
        (
            "ROOT %y = (f32[64,1024]{1,0:S(1)}, f32[64,1024]{1,0}, u32[]{:S(2)}) copy-start(%x)",
            4 * 64 * 1024,
        ),
        (
            'ROOT %y = f32[8,1024] custom-call(%x), custom_call_target="tpu_custom_call"',
            4 * 72 * 1024,
        ),
        ('ROOT %y = f32[64,1024] custom-call(), custom_call_target="AllocateBuffer"', 0),
        ("ROOT %y = f32[1,1024] fusion(%x, %i), kind=kLoop, calls=%sliced", 2 * 4 * 1024),
        ("ROOT %y = f32[64,1024] fusion(%x, %row), kind=kLoop, calls=%updated", 2 * 4 * 1024),
    ],
)
def test_bytes_of_an_instruction(lines, moved):
    computations = """%sliced (a: f32[64,1024], b: s32[]) -> f32[1,1024] {
  %a = f32[64,1024] parameter(0)
  %b = s32[] parameter(1)
  %cut = f32[1,1024] dynamic-slice(%a, %b, %b)
  ROOT %n = f32[1,1024] negate(%cut)
}

%updated (a.1: f32[64,1024], b.1: f32[1,1024]) -> f32[64,1024] {
  %a.1 = f32[64,1024] parameter(0)
  %b.1 = f32[1,1024] parameter(1)
  %z.1 = s32[] constant(3)
  ROOT %u = f32[64,1024] dynamic-update-slice(%a.1, %b.1, %z.1, %z.1)
}
"""
    inputs = (BIG, "%i = s32[]{:S(6)} parameter(1)", "%row = f32[1,1024] parameter(2)")
    text = entry(*inputs, lines, computations=computations)
    assert work(text).bytes_accessed == moved


def test_a_kernel_counts_its_own_estimate():
    call = 'f32[8] custom-call(%x), custom_call_target="tpu_custom_call", backend_config={}'
    estimate = '{"custom_call_config":{"cost_estimate":{"bytes_accessed":"9","flops":"77"}}}'
    lines = (f"%k = {call}".replace("{}", estimate), f"ROOT %l = {call}")
    found = work(entry(BIG, *lines))
    assert (found.kernel_flops, found.unestimated, found.product_flops) == (77, 1, 0)


def test_a_collective_in_flight_counts_where_it_starts():
    """A fusion that continues it counts the product beside it only."""
    computations = """%start (a: f32[8]) -> (f32[8], f32[64]) {
  %a = f32[8] parameter(0)
  %g = f32[64] all-gather(%a), dimensions={0}
  ROOT %c = (f32[8], f32[64]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (a.1: f32[8], b.1: f32[64]) -> (f32[64,1024], f32[8], f32[64]) {
  %a.1 = f32[8] parameter(0)
  %b.1 = f32[64] parameter(1)
  %x.1 = f32[64,1024] parameter(2)
  %n.1 = f32[64,1024] negate(%x.1)
  %g.1 = f32[64] all-gather(%a.1), dimensions={0}
  ROOT %t.1 = (f32[64,1024], f32[8], f32[64]) tuple(%n.1, %a.1, %g.1)
}

%done (a.2: f32[8], b.2: f32[64]) -> f32[64] {
  %a.2 = f32[8] parameter(0)
  %b.2 = f32[64] parameter(1)
  ROOT %c.2 = f32[64] custom-call(%b.2), custom_call_target="AsyncCollectiveDone"
}
"""
    own = (
        '{"continuation_config":{"operand_original_end":"2","operand_original_start":"2",'
        '"output_tuple_original_end":"0","output_tuple_original_start":"0"}}'
    )
    text = entry(
        BIG,
        "%s = f32[8] parameter(1)",
        "%async-collective-start = (f32[8], f32[64]) fusion(%s), kind=kCustom, calls=%start",
        "%f = (f32[64,1024], f32[8], f32[64]) fusion(%async-collective-start#0,"
        " %async-collective-start#1, %x), kind=kOutput, calls=%async_collective_fusion.1,"
        f" backend_config={own}",
        "ROOT %async-collective-done = f32[64] fusion(%f#1, %f#2), kind=kCustom, calls=%done",
        computations=computations,
    )
    started, beside = 4 * (8 + 8 + 64), 2 * 4 * 64 * 1024
    assert work(text).bytes_accessed == started + beside
    assert [one.name for one in collectives(text)] == ["g"]


def test_an_operand_that_is_an_element_has_the_bytes_of_the_element():
    """Newer texts write `%pair#1` for a get-tuple-element."""
    lines = ("%pair = (f32[8], f32[64]) parameter(0)", "ROOT %r = f32[8] all-reduce(%pair#0)")
    (found,) = collectives(entry(*lines))
    assert (found.operand_bytes, found.result_bytes) == (32, 32)


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "flops"),
    [
        ("64,32", "32,16", "64,16", "dim_labels=bf_io->bf", 2 * 64 * 32 * 16),
        ("32,64", "16,32", "64,16", "dim_labels=fb_oi->bf", 2 * 64 * 32 * 16),
        # A dimension of the batch as a window that meets itself alone: one product per place.
        (
            "4,64,32",
            "4,32,16",
            "4,64,16",
            "window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
            2 * 4 * 64 * 32 * 16,
        ),
        # Two places of the sum in a window.
        ("64,2,32", "2,32,16", "64,1,16", "window={size=2}, dim_labels=b0f_0io->b0f", 2 * 2**16),
        # Padding is not multiplied: three places, of which the outer ones lack an element.
        ("1,3,8", "3,8,1", "1,3,1", "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 2 * 7 * 8),
    ],
)
def test_flops_of_a_convolution(left, right, result, attributes, flops):
    module = parse_module(
        entry(
            f"%l = f32[{left}] parameter(0)",
            f"%r = f32[{right}] parameter(1)",
            f"ROOT %c = f32[{result}] convolution(%l, %r), {attributes}",
        )
    )
    assert convolution_flops(module.roots["main"], module.computations["main"]) == flops
