# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""AdaLoRA against PEFT's allocator on the same parameters and gradients, and its budget."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxmoe.adapters import AdaLoraConfig, StepGiven, TargetsConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import TrainState
from tests.support.models import TINY

CONFIG = AdaLoraConfig(rank=4, target_rank=2, initial=2, final=9, interval=3)
MODEL = dataclasses.replace(TINY, adapter=CONFIG)
TABLE = parameter_table(MODEL)
PLACEMENT = ExecutionConfig().placement
MATRICES = sorted(row.path.removesuffix(":values") for row in TABLE if ":values" in row.path)


def drawn(number):
    """Values of all parameters of the adapter, and zeros for the others."""
    rng = np.random.default_rng(number)

    def value(row):
        is_own = row.path.endswith((":down", ":up", ":values"))
        return rng.standard_normal(row.shape) if is_own else np.zeros(row.shape)

    return TABLE.tree(lambda row: jnp.asarray(value(row), jnp.float32))


def first_state(params):
    number = jnp.zeros((), jnp.int32)
    return TrainState(
        step=number,
        params=params,
        opt_state=(),
        router_state=initial_router_state(MODEL),
        rng=jax.random.key(0),
        skipped=number,
        skipped_in_a_row=number,
        parts={"adapter": CONFIG.first_state(params, TABLE, jax.random.key(0))},
    )


@jax.jit
def follow(state, params, grads):
    state = dataclasses.replace(state, step=state.step + 1, params=params)
    return CONFIG.after_step(state, TABLE.select_trained(grads), StepGiven(None, TABLE, PLACEMENT))


def flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def as_theirs(params):
    """Factors as PEFT names and turns them, by layer."""
    given = flat(params)
    for path in MATRICES:
        rank = given[f"{path}:values"].shape[-1]
        for layer in range(given[f"{path}:values"].shape[0]):
            down, up, values = (
                np.asarray(given[f"{path}:{n}"][layer]) for n in ("down", "up", "values")
            )
            yield f"{path}.{layer}.lora_A.default", down.reshape(-1, rank).T
            yield f"{path}.{layer}.lora_B.default", up.reshape(rank, -1).T
            yield f"{path}.{layer}.lora_E.default", values[:, None]


def allocator(torch, module, **changes):
    rank_allocator = pytest.importorskip(
        "peft.tuners.adalora.layer", reason="peft is not installed"
    ).RankAllocator
    fields = {"beta1": 0.85, "beta2": 0.85, "target_r": 2, "tinit": 2, "tfinal": 3, "deltaT": 3}
    config = types.SimpleNamespace(**{**fields, "total_step": 12, **changes})
    return rank_allocator(module, config, "default")


class Parameters:
    """Parameters by name, as a module of torch lists them."""

    def __init__(self, torch, params):
        self.of = {
            name: torch.nn.Parameter(torch.tensor(value)) for name, value in as_theirs(params)
        }

    def named_parameters(self):
        return self.of.items()


@pytest.mark.slow
def test_scores_and_masks_equal_those_of_peft():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    state, theirs = first_state(drawn(0)), Parameters(torch, drawn(0))
    allocates = allocator(torch, theirs)
    for step in range(1, 10):
        params, grads = drawn(step), drawn(100 + step)
        state = follow(state, params, grads)
        given = dict(as_theirs(params)), dict(as_theirs(grads))
        for name, parameter in theirs.of.items():
            parameter.data = torch.tensor(given[0][name])
            parameter.grad = torch.tensor(given[1][name])
        if step < 9:
            allocates.update_and_allocate(theirs, step)
        else:
            allocates.update_and_allocate(theirs, step, force_mask=True)
        for kind, averages in (
            ("sensitivity", allocates.exp_avg_ipt),
            ("uncertainty", allocates.exp_avg_unc),
        ):
            found = dict(as_theirs(state.parts["adapter"][kind]))
            assert found.keys() == averages.keys()
            for name in found:
                np.testing.assert_allclose(found[name], averages[name], rtol=2e-6, atol=1e-7)
        for name, value in as_theirs(state.params):
            np.testing.assert_array_equal(value, theirs.of[name].detach().numpy(), str(step))


def test_budget_equals_that_of_peft_and_ends_exactly():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    allocates = allocator(torch, Parameters(torch, drawn(0)))
    ours = [CONFIG.budget(step, TABLE) for step in range(13)]
    assert ours == [allocates.budget_schedule(step)[0] for step in range(13)]
    first, last = CONFIG.budgets(TABLE)
    assert (first, last) == (4 * 2 * len(MATRICES), 2 * 2 * len(MATRICES))
    assert (ours[0], ours[9]) == (first, last) and ours == sorted(ours, reverse=True)


def live(state):
    given = flat(state.params)
    return sum(int((given[f"{path}:values"] != 0).sum()) for path in MATRICES)


def test_live_triplets_are_the_budget_and_stay_in_the_end():
    state = first_state(drawn(0))
    for step in range(1, 13):
        state = follow(state, drawn(step), drawn(100 + step))
        if step in (3, 6, 9) or step > 9:
            assert live(state) == CONFIG.budget(step, TABLE), step
        else:
            assert live(state) == CONFIG.budgets(TABLE)[0]
        if step == 9:
            chosen = jax.tree.map(np.asarray, state.parts["adapter"])
    jax.tree.map(np.testing.assert_array_equal, state.parts["adapter"], chosen)


def test_layers_without_an_addition_take_nothing_of_the_budget():
    adapter = dataclasses.replace(CONFIG, targets=TargetsConfig(layers=(1,)))
    table = parameter_table(dataclasses.replace(TINY, adapter=adapter))
    assert adapter.budgets(table) == (4 * len(MATRICES), 2 * len(MATRICES))


def test_orthonormal_factors_have_no_loss():
    params = flat(drawn(0))
    for path in MATRICES:
        params[f"{path}:scale"] += 1.0
        for name, turns in (("down", False), ("up", True)):
            value = params[f"{path}:{name}"]
            rank = params[f"{path}:values"].shape[-1]
            wide = value.reshape(2, rank, -1).swapaxes(1, 2) if turns else value
            wide = jnp.linalg.qr(wide.reshape(2, -1, rank))[0]
            wide = wide.swapaxes(1, 2) if turns else wide
            params[f"{path}:{name}"] = wide.reshape(value.shape)
    nested = traverse_util.unflatten_dict(params, sep="/")
    loss, grads = jax.value_and_grad(lambda p: CONFIG.losses(p, PLACEMENT)["orthogonality"])(nested)
    assert float(loss) < 1e-6 and np.isfinite(sum(map(jnp.sum, jax.tree.leaves(grads))))
    doubled = jax.tree.map(lambda x: 2**0.5 * x, nested)
    # F F^T - 1 = 1 of r x r, whose norm is sqrt(r)
    found = CONFIG.losses(doubled, PLACEMENT)["orthogonality"]
    assert float(found) == pytest.approx(0.1 * 4**0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_rank": 5}, "target_rank=5 must be at least 1 and at most adapter.rank=4"),
        ({"final": 2}, "initial=2 must be at least 0 and below adapter.final=2"),
        ({"interval": 0}, "interval=0 must be at least 1"),
        ({"uncertainty_decay": 1.0}, "uncertainty_decay=1.0 must lie between 0 and 1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
