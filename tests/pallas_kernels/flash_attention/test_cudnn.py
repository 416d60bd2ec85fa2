# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests attention by cuDNN: when it is chosen, what it refuses, lowering, gradients.

    JAX_PLATFORMS=cuda,cpu pytest -n 0 -m accelerator tests/pallas_kernels   on a GPU

Without a GPU nothing of cuDNN runs: its calls are compared with those of jax.nn, and a double made
of the reference takes their place where values count.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import OPERATIONS, backend, flash_attention, proof, ring_attention
from pallas_kernels.flash_attention import cudnn, kernels, reference, xla
from pallas_kernels.flash_attention.mask import Rules, Tokens

FORWARD = "custom_call @__cudnn$fmhaSoftmax("
BACKWARD = "custom_call @__cudnn$fmhaSoftmaxBackward("
OTHERS = ("custom_call @mosaic_gpu", "custom_call @__gpu$xla.gpu.triton")


def on(kind):
    device = AbstractDevice(kind, 132, "cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def arrays_of(s=256, u=None, h=128, hv=None, dtype=jnp.bfloat16):
    shapes = (2, s, 4, h), (2, u or s, 2, h), (2, u or s, 2, hv or h)
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def arguments_of(tokens=(), causal=True, window=None, softcap=None, scale=None, **shapes):
    q, k, v = arrays_of(**shapes)
    ids: Any = jax.ShapeDtypeStruct((2, q.shape[1]), jnp.int32)
    given = Tokens(*(ids if name in tokens else None for name in Tokens._fields))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return q, k, v, given, Rules(causal=causal, window=window, softcap=softcap, scale=scale)


SEGMENTS = ("q_segment_ids", "kv_segment_ids")
POSITIONS = ("q_positions", "kv_positions")

REFUSED = {
    "segments": ({"tokens": SEGMENTS}, "cuDNN knows no segments"),
    "positions": ({"tokens": POSITIONS}, "counts positions from 0"),
    "positions of keys": ({"tokens": ("kv_positions",)}, "counts positions from 0"),
    "softcap": ({"softcap": 30.0}, "no softcap"),
    "float32": ({"dtype": jnp.float32}, "takes bfloat16 and float16, not float32"),
    "window of both sides": ({"window": 9, "causal": False}, "windows under a causal mask only"),
    "fewer keys": ({"u": 128}, "as many queries as keys, not 256 and 128"),
    "latent heads": ({"h": 192, "hv": 128}, "128 is not 192"),
    "odd heads": ({"h": 60}, "a multiple of 8, at most 256 here, not 60"),
    "widest heads": ({"h": 264}, "a multiple of 8, at most 256 here, not 264"),
}
UNMEASURED = {
    "float16": {"dtype": jnp.float16},
    "full": {"causal": False},
    "full, fewer keys": {"causal": False, "u": 128},
    "heads of 96": {"h": 96},
    "length of 200": {"s": 200},
}
TAKEN = {
    "heads of 128": {},
    "heads of 64": {"h": 64},
    "heads of 256": {"h": 256},
    "window": {"window": 70},
    "longer window": {"window": 300},
    "scale": {"scale": 0.1},
}


@pytest.mark.parametrize("name", TAKEN)
def test_chosen_where_it_was_measured_ahead(name):
    operation, arguments = OPERATIONS["flash_attention"], arguments_of(**TAKEN[name])
    with on("NVIDIA H100 80GB HBM3"):
        choice = operation.choose(None, *arguments)
        assert choice.implementation == "cudnn"
        assert "28 to 42 times as fast as xla" in choice.reason and "2026-11-27" in choice.reason
    with on("NVIDIA H200"):
        assert operation.choose(None, *arguments).implementation == "cudnn"
    for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA B200"):
        with on(kind):
            choice = operation.choose(None, *arguments)
            assert choice.implementation == "pallas_gpu"
            assert "not cudnn: it was measured faster than pallas_gpu on comp" in choice.reason


@pytest.mark.parametrize("name", [*REFUSED, *UNMEASURED])
def test_not_chosen_for_other_arguments(name):
    given, words = REFUSED.get(name) or (UNMEASURED[name], "measured faster for causal bfloat16")
    with on("NVIDIA H100 80GB HBM3"):
        choice = OPERATIONS["flash_attention"].choose(None, *arguments_of(**given))
    wanted = "xla" if name == "widest heads" else "pallas_gpu"
    assert choice.implementation == wanted
    assert re.search(f"not cudnn: .*{re.escape(words)}", choice.reason)


def test_not_chosen_without_all_arguments():
    with on("NVIDIA H100 80GB HBM3"):
        for arguments in ((), arrays_of()):
            choice = OPERATIONS["flash_attention"].choose(None, *arguments)
            assert choice.implementation == "pallas_gpu"
            assert "not cudnn: it takes causal attention over whole sequences" in choice.reason


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_is_refused_by_name(name):
    given, words = REFUSED[name]
    with on("NVIDIA H100 80GB HBM3"), pytest.raises(ValueError) as error:
        jax.eval_shape(lambda: cudnn.flash_attention(*map(_zeros, arguments_of(**given))))
    assert str(error.value).startswith("flash_attention: implementation='cudnn': ")
    assert words in str(error.value)
    assert str(error.value).endswith("or None for the best that takes these arguments.")


def _zeros(argument):
    if isinstance(argument, Rules):
        return argument
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), argument)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("NVIDIA A100-SXM4-80GB", "at most 128 here, not 256"),
        ("NVIDIA B200", "at most 128 here, not 256"),
        ("Tesla V100", "compute capability 8.0 or later, this is no NVIDIA GPU"),
    ],
)
def test_gpus_that_do_not_take_it(kind, words):
    with on(kind), pytest.raises(ValueError, match=words):
        lowered(lambda *x: flash_attention(*x, implementation="cudnn"), *arrays_of(h=256))


def test_a_cpu_is_refused():
    q = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="implementation='cudnn' needs a gpu and this process has"):
        flash_attention(q, q, q, implementation="cudnn")


def lowered(function, *arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def value_and_gradients(attend, has_lse_gradient=False):
    def both(q, k, v):
        out, pull, lse = jax.vjp(attend, q, k, v, has_aux=True)
        return out, lse, pull(out)

    def through_lse(q, k, v):
        results, pull = jax.vjp(attend, q, k, v)
        return results, pull(results)

    return through_lse if has_lse_gradient else both


OWN = {
    "causal": ({}, {"mask_type": jax_cudnn.MaskType.CAUSAL}),
    "full": ({"causal": False, "u": 384}, {"mask_type": jax_cudnn.MaskType.NO_MASK}),
    "window": (
        {"window": 70, "scale": 0.25, "h": 64},
        {"mask_type": jax_cudnn.MaskType.CAUSAL, "sliding_window_length": 70, "scale": 0.25},
    ),
    "window of all": ({"window": 256}, {"mask_type": jax_cudnn.MaskType.CAUSAL}),
    "float16": ({"dtype": jnp.float16}, {"mask_type": jax_cudnn.MaskType.CAUSAL}),
    "wide": ({"h": 256}, {"mask_type": jax_cudnn.MaskType.CAUSAL}),
}


@pytest.mark.parametrize("name", OWN)
def test_its_calls_are_those_of_jax(name, monkeypatch):
    """Both passes, with the log-sum-exp in float32 between them."""
    monkeypatch.setattr(jax_cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(jax_cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(jax_cudnn, "is_cuda_compute_capability_equal", lambda _: False)
    ours, theirs = OWN[name]
    shapes = {key: ours[key] for key in ("u", "h", "dtype") if key in ours}
    options = {key: value for key, value in ours.items() if key not in shapes}
    arrays = arrays_of(**shapes)
    theirs = {"scale": arrays[0].shape[-1] ** -0.5} | theirs

    def own(q, k, v):
        return jax_cudnn.dot_product_attention(q, k, v, **theirs, return_residual=True)

    attend = functools.partial(flash_attention, **options, implementation="cudnn")
    with on("NVIDIA H100 80GB HBM3"):
        texts = [lowered(value_and_gradients(one), *arrays) for one in (attend, own)]
    calls, wanted = (
        [re.sub(r"%[\w#]+", "%", one) for one in re.findall("custom_call @__cudnn.*", text)]
        for text in texts
    )
    assert len(calls) == 2 and calls == wanted
    assert not any(other in texts[0] for other in OTHERS)


def test_a_gradient_of_the_log_sum_exp_takes_our_backward_pass():
    attend = functools.partial(flash_attention, implementation="cudnn")
    with on("NVIDIA H100 80GB HBM3"):
        text = lowered(value_and_gradients(attend, has_lse_gradient=True), *arrays_of())
    assert (text.count(FORWARD), text.count(BACKWARD)) == (1, 0)
    assert text.count(OTHERS[0]) == 2


def test_whole_programs_know_that_there_is_no_such_gradient():
    """In loops, recomputed layers, compiled functions and manual regions."""
    device = AbstractDevice("NVIDIA H200", 132, "cuda")
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)

    @jax.jit
    def attend(q):
        return flash_attention(q, q, q)[0]

    def loss(q):
        regions = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        layer = jax.checkpoint(lambda x, _: (x + regions(x), None))
        return jnp.sum(jax.lax.scan(layer, q, None, length=3)[0].astype(jnp.float32))

    q = jax.ShapeDtypeStruct((2, 256, 4, 128), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        text = lowered(jax.grad(loss), q)
    assert (text.count(FORWARD), text.count(BACKWARD)) == (2, 1)
    assert not any(other in text for other in OTHERS)


def double(target, products, operands, given, results):
    """Return what cuDNN would, from the reference."""
    if target == "__cudnn$fmhaSoftmax":
        out, lse = reference.flash_attention(*operands)
        return [jnp.swapaxes(out, 1, 2), lse]
    *_, lse, d_out, out = given
    gradient = kernels.OutGradient(d_out, lse, kernels.softmax_delta(out, d_out))
    found = reference.differentiate(operands, gradient)
    return [jnp.swapaxes(x, 1, 2).astype(y.dtype) for x, y in zip(found, results, strict=True)]


@pytest.mark.parametrize("has_lse_gradient", [False, True])
def test_gradients(monkeypatch, has_lse_gradient):
    monkeypatch.setattr(cudnn, "_call", double)
    monkeypatch.setattr(cudnn, "capability_or_none", lambda: (9, 0))
    monkeypatch.setattr(cudnn.pallas_gpu, "differentiate", xla.differentiate)
    *shapes, tokens, rules = arguments_of(s=40, h=8, window=9)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True)]

    def run(function):
        attend = functools.partial(function, tokens=tokens, rules=rules)
        return jax.jit(value_and_gradients(attend, has_lse_gradient))(*arrays)

    def by_cudnn(q, k, v, tokens, rules):
        return cudnn.flash_attention(q, k, v, tokens, rules)

    found = (jax.tree.leaves(run(one)) for one in (by_cudnn, reference.flash_attention))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=3e-2, atol=5e-2)


@pytest.mark.slow
def test_a_ring_uses_it_by_name_where_nothing_but_the_order_counts():
    device = AbstractDevice("NVIDIA H200", 132, "cuda")
    mesh = AbstractMesh((2,), ("seq",), axis_types=(AxisType.Auto,), abstract_device=device)

    def run(implementation, packs=False):
        def attend(q, ids):
            ids = ids if packs else None
            given = {"axis_name": "seq", "segment_ids": ids, "implementation": implementation}
            return ring_attention(q, q, q, **given)[0].astype(jnp.float32).sum()

        specs = (P(None, "seq"), P(None, "seq"))
        grad = jax.shard_map(jax.grad(attend), mesh=mesh, in_specs=specs, out_specs=specs[0])
        arrays = ((2, 512, 4, 128), jnp.bfloat16), ((2, 512), jnp.int32)
        with jax.sharding.use_abstract_mesh(mesh):
            return lowered(grad, *(jax.ShapeDtypeStruct(*x) for x in arrays))

    text = run(None)
    assert OTHERS[0] in text and "cudnn" not in text
    text = run("cudnn")
    assert FORWARD in text and BACKWARD not in text and OTHERS[0] in text
    with pytest.raises(ValueError, match="implementation='cudnn': cuDNN knows no segments"):
        run("cudnn", packs=True)


def test_wrong_or_failing_calls_are_not_chosen(monkeypatch):
    """Each class of arguments is compared by what None chooses for it, until one is right."""
    monkeypatch.setattr(backend, "_WRONG", {})
    judged = []

    def compare(name, implementation, case, *, scales):
        judged.append((case, implementation))
        is_right = implementation != "cudnn" or case == "whole"
        error = 0.001 if is_right else None
        return proof.Verdict(operation=name, implementation=implementation, case=case, error=error)

    monkeypatch.setattr(proof, "compare", compare)
    with on("NVIDIA H100 80GB HBM3"):
        with pytest.warns(UserWarning, match="cudnn failed for window: .*no longer chooses it"):
            verdicts = proof.prove(["flash_attention"])
        choice = OPERATIONS["flash_attention"].choose(None, *arguments_of())
    cases = ("whole", "window", "wide heads")
    first = [("documents", "pallas_gpu"), *((case, "cudnn") for case in cases)]
    # What is dropped for one case leaves the others as well, which are compared again.
    second = [(case, "pallas_gpu") for case in cases]
    assert sorted(judged[:4]) == sorted(first) and sorted(judged[4:]) == sorted(second)
    assert [(one.case, one.implementation) for one in verdicts] == [*first, *second]
    assert [one.is_right for one in verdicts] == [True, True, False, False, True, True, True]
    assert choice.implementation == "pallas_gpu" and "cudnn failed for window" in choice.reason


@pytest.mark.accelerator
@pytest.mark.parametrize("has_lse_gradient", [False, True])
@pytest.mark.parametrize("name", [*TAKEN, "full, fewer keys", "float16", "heads of 96"])
def test_on_a_gpu(name, has_lse_gradient):
    """Values, log-sum-exp and gradients agree with the float32 reference."""
    if jax.default_backend() != "gpu":
        pytest.skip("cuDNN is for GPUs")
    *shapes, tokens, rules = arguments_of(**(UNMEASURED | TAKEN)[name] | {"s": 512})
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True)]

    def run(function, arrays):
        attend = lambda q, k, v: function(q, k, v, tokens, rules)  # noqa: E731
        return jax.jit(value_and_gradients(attend, has_lse_gradient))(*arrays)

    with jax.default_matmul_precision("highest"):
        expected = run(reference.flash_attention, [x.astype(jnp.float32) for x in arrays])
    parts = ("out", "lse", "d_q", "d_k", "d_v")
    found = run(cudnn.flash_attention, arrays)
    for part, x, y in zip(parts, *map(jax.tree.leaves, (found, expected)), strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        assert np.abs(x - y).max() <= 3e-2 * max(1.0, np.abs(y).max()), part
