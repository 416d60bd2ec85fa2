# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixture of Shards: the number of shards, LoRA as a special case, choices that no step changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxmoe.adapters import LoraConfig, MixtureOfShardsConfig, TargetsConfig, fold_adapters
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import forward
from jaxmoe.scaling.initialize import init_params, parameter_table
from tests.support.models import FULL, TINY
from tests.support.tolerances import assert_close

ROLES = ("attention_in", "attention_out", "mlp_in", "expert_in")
CONFIG = MixtureOfShardsConfig(
    rank=4, equivalent_rank=2, expert_rank=2, shards=2, targets=TargetsConfig(roles=ROLES)
)


def flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def adapted(model, config):
    return dataclasses.replace(model, adapter=config)


def test_pools_hold_what_lora_of_the_equivalent_rank_holds():
    lora = LoraConfig(rank=2, expert_rank=1, targets=CONFIG.targets)
    found, wanted = (
        sum(row.size for row in parameter_table(adapted(FULL, config)).trained_rows)
        for config in (CONFIG, lora)
    )
    assert found == wanted
    table = {row.path: row for row in parameter_table(adapted(TINY, CONFIG))}
    # 2 layers x rank 2 x 2 shards of 16 / 2 inputs; experts: 2 layers x 4 experts x rank 1.
    assert table["shards/q_16x4x6:down"].shape == (8, 8)
    assert table["shards/q_16x4x6:up"].shape == (8, 12, 1)
    assert table["shards/gate_up_4x16x2x10:down"].shape == (16, 8)


def test_layers_of_several_stacks_share_pools():
    paths = [row.path for row in parameter_table(adapted(FULL, CONFIG)) if "q_16" in row.path]
    assert paths == ["shards/q_16x4x6:down", "shards/q_16x4x6:up"]  # of dense and MoE blocks


def test_one_private_shard_per_vector_is_lora():
    targets = TargetsConfig(roles=("attention_in", "attention_out", "expert_in"))
    own = MixtureOfShardsConfig(
        rank=3, equivalent_rank=3, private=3, expert_rank=2, shards=1, targets=targets
    )
    lora = LoraConfig(rank=3, expert_rank=2, targets=targets)
    params = flat(init_params(adapted(TINY, own), jax.random.key(0)))
    for number, path in enumerate([path for path in params if "shards" in path]):
        key = jax.random.fold_in(jax.random.key(1), number)
        params[path] = jax.random.normal(key, params[path].shape)
    factors = {path: x for path, x in params.items() if "shards" not in path}
    for row in parameter_table(adapted(TINY, lora)).trained_rows:
        path, _, side = row.path.rpartition(":")
        shape = "x".join(map(str, params[path].shape[1:]))
        pool = np.asarray(params[f"shards/{path.rpartition('/')[2]}_{shape}:{side}"])
        if side == "up":  # [m r out] is [L *G r *O]
            factors[row.path] = jnp.asarray(pool.reshape(row.shape))
        else:
            batch = 2 if "experts" in path else 1
            turned = (*row.shape[:batch], row.shape[-1], *row.shape[batch:-1])
            factors[row.path] = jnp.asarray(np.moveaxis(pool.reshape(turned), batch, -1))
    ids = jax.random.randint(jax.random.key(2), (2, 6), 0, TINY.vocab_size)

    def logits(config, values):
        tree = traverse_util.unflatten_dict(values, sep="/")
        return forward(adapted(TINY, config), ExecutionConfig(), tree, ids).logits

    found, wanted = jax.jit(lambda: logits(own, params))(), jax.jit(lambda: logits(lora, factors))()
    np.testing.assert_array_equal(found, wanted)
    assert float(jnp.abs(found).max()) > 0


def test_choices_are_constants_that_differ_for_both_factors():
    given = {"places": 3, "rank": 4, "equivalent": 2}
    down, up = (CONFIG.ids(f"shards/q:{side}", **given) for side in ("down", "up"))
    np.testing.assert_array_equal(down, CONFIG.ids("shards/q:down", **given))
    assert down.shape == (3, 4, 2) and np.any(down != up)
    assert np.any(down != dataclasses.replace(CONFIG, seed=1).ids("shards/q:down", **given))
    private = down[:, 0].ravel()
    np.testing.assert_array_equal(private, np.arange(6))
    shared = down[:, 1:]
    assert shared.min() >= 6 and shared.max() < 3 * 2 * 2
    for layer in shared:  # 6 of the 6 shared ones, none twice
        assert len(np.unique(layer)) == layer.size
    names = {row.path.rpartition(":")[2] for row in parameter_table(adapted(TINY, CONFIG))}
    assert {name for name in names if "/" not in name} == {"down", "up", "scale"}


def test_a_fold_computes_what_the_pools_do():
    model = adapted(FULL, CONFIG)
    params = flat(init_params(model, jax.random.key(0)))
    for path in [path for path in params if path.endswith(":up")]:
        params[path] = jax.random.normal(jax.random.key(len(path)), params[path].shape)
    params = traverse_util.unflatten_dict(params, sep="/")
    plain = fold_adapters(CONFIG.prepare(params, ()))
    assert not any(":" in path for path in flat(plain))
    ids = jax.random.randint(jax.random.key(2), (2, 6), 0, FULL.vocab_size)
    found = jax.jit(lambda: forward(model, ExecutionConfig(), params, ids).logits)()
    wanted = jax.jit(lambda: forward(FULL, ExecutionConfig(), plain, ids).logits)()
    assert_close(found, wanted, "end_to_end")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"equivalent_rank": 5}, "equivalent_rank=5 must be at least 1 and at most adapter.rank=4"),
        ({"private": 2}, "private=2 must be at least 0 and below adapter.equivalent_rank=2"),
        ({"shards": 0}, "shards=0 must be at least 1"),
        ({"shards": 3}, "shards=3 must divide the inputs of"),
        ({"targets": TargetsConfig(roles=("head",))}, "head lie outside of them: leave them out"),
        (
            {"targets": TargetsConfig(layers=(1,))},
            r"layers=\(1,\) has some of the layers of .*, which share shards",
        ),
    ],
)
def test_pools_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parameter_table(adapted(TINY, dataclasses.replace(CONFIG, **changes)))
