# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what a model is made of: two steps on one device with each member of each choice."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from tests.support.hashes.digests import digest_of_tree
from tests.support.hashes.rows import Row, steps

SIZES = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "inner_dim": 32,
    "state_dim": 4,
    "step_rank": 2,
    "conv_length": 3,
    "chunk": 8,
    "latent_dim": 16,
    "query_latent_dim": 12,
    "nope_dim": 8,
    "rope_dim": 4,
    "value_dim": 8,
    "prefix_length": 4,
    "hidden_dim": 24,
    "num_keys": 4,
    "key_dim": 4,
    "big_dim": 16,
    "small_dim": 4,
}
"""Fields of mixers and feed-forwards, where they have them."""

ADAPTER_SIZES = {
    "rank": 3,
    "expert_rank": 2,
    "approximation_rank": 4,
    "target_rank": 1,
    "candidates": 4,
    "shards": 1,
    "members": 3,
    "tasks": 3,
    "initial": 0,
    "final": 1,
    "interval": 1,
    "steps": 4,
    "splits": 2,
    "refresh_every": 1,
    "draws": 2,
}


def rows() -> Iterator[tuple[str, Row]]:
    """Yield the rows."""
    from jaxmoe.adapters import ADAPTERS
    from jaxmoe.configs import registry_of
    from jaxmoe.layers.feed_forwards import FeedForwardBase
    from jaxmoe.layers.mixers import MixerBase
    from jaxmoe.layers.residual import RESIDUALS
    from jaxmoe.routing import BALANCERS, BIASES, CAPACITIES, GATES, METHODS, ROUTERS
    from jaxmoe.training import OBJECTIVES
    from jaxmoe.training.estimators import ESTIMATORS

    yield from _each("router", ROUTERS, _router)
    yield from _each("gate", GATES, _gate)
    yield from _each("bias", BIASES, _bias)
    yield from _each("capacity", CAPACITIES, _capacity_member)
    yield from _each("balancer", BALANCERS, _balancer)
    yield from _each("method", METHODS, _method)
    yield from _each("mixer", registry_of(MixerBase), _mixer)
    yield from _each("feed_forward", registry_of(FeedForwardBase), _feed_forward)
    yield from _each("residual", RESIDUALS, _residual)
    yield from _each("objective", OBJECTIVES, _objective)
    yield from _each("estimator", ESTIMATORS, _estimator)
    yield from _each("adapter", ADAPTERS, _adapter)
    for name, function in _MODELS.items():
        yield f"model/{name}", functools.partial(_model, function)


def _each(area: str, members: Mapping[str, Any], row: Any) -> Iterator[tuple[str, Row]]:
    for name in members:
        yield f"{area}/{name}", functools.partial(row, members[name])


def _router(config: Any, directory: pathlib.Path) -> dict[str, str]:
    """The router alone, in each of its cases: choice, gradient and updated state."""
    import jax
    import jax.numpy as jnp

    from tests.support.routers import ROUTER_CASES, Case, build, drawn, given, initial

    cases = ROUTER_CASES.get(config.name, (Case(config=config()),))
    parts = {}
    for index, case in enumerate(cases):
        router, (params, state), x = build(case), initial(case), drawn(1)

        def scores(params, x, router=router, state=state):
            output = router.route(params, state, given(x), train=True, key=jax.random.key(3))
            # An empty slot has the score -inf.
            kept = jnp.where(jnp.isfinite(output.selection.scores), output.selection.scores, 0.0)
            return jnp.sum(jnp.sin(kept)), output

        gradient = jax.jit(jax.value_and_grad(scores, (0, 1), has_aux=True, allow_int=True))
        (_, output), gradients = gradient(params, x)
        updated = router.update(state, output.statistics, jnp.int32(0))
        chosen = output.selection
        tree = [chosen.token_ids, chosen.expert_ids, chosen.scores]
        parts[f"choice {index}"] = digest_of_tree(tree)
        parts[f"gradients {index}"] = digest_of_tree(jax.tree.leaves(gradients))
        parts[f"state {index}"] = digest_of_tree(jax.tree.leaves([updated, output.statistics]))
    return parts


def _gate(config: Any, directory: pathlib.Path) -> dict[str, str]:
    return steps.two_steps(steps.with_parts(gate=config()))


def _bias(config: Any, directory: pathlib.Path) -> dict[str, str]:
    from jaxmoe.routing import ROUTERS

    return steps.two_steps(steps.with_parts(router=ROUTERS["softmax_topk"](bias=config())))


def _balancer(config: Any, directory: pathlib.Path) -> dict[str, str]:
    from jaxmoe.routing import METHODS

    needed = next(
        (
            method.parts()
            for method in METHODS.values()
            if any(isinstance(balancer, config) for balancer in method.balancers)
        ),
        {},
    )
    coefficient = {"coefficient": 0.5}
    return steps.two_steps(
        steps.with_parts(**needed | {"balancers": (steps.fitting(config, coefficient),)})
    )


def _method(method: Any, directory: pathlib.Path) -> dict[str, str]:
    return _trained(steps.with_parts(**method.parts() | {"capacity": _sized(method.capacity)}))


def _trained(model: Any, **options: Any) -> dict[str, str]:
    """Two steps; of a model that is not causal, by masked diffusion."""
    from jaxmoe.training import OBJECTIVES

    if not model.attention.is_causal:
        options = {"objective": OBJECTIVES["masked_diffusion"](), **options}
        model = dataclasses.replace(model, vocab_size=steps.VOCAB + 1)
    return steps.two_steps(model, **options)


def _mixer(config: Any, directory: pathlib.Path) -> dict[str, str]:
    # The others rotate whole heads, which is their default.
    sizes = SIZES | ({"rotary_dim": 4} if config.name == "rotary_lightning" else {})
    model = dataclasses.replace(steps.tiny_model(), attention=steps.fitting(config, sizes))
    return steps.two_steps(model) | steps.parameter_rows(model)


def _feed_forward(config: Any, directory: pathlib.Path) -> dict[str, str]:
    from jaxmoe.models.config import LayerConfig

    model = steps.tiny_model()
    fed = model.moe if config.is_routed else steps.fitting(config, SIZES | {"top_k": 2})
    layers = (LayerConfig(feed_forward=fed), LayerConfig())
    model = dataclasses.replace(model, dense_layers=(), layers=layers)
    return steps.two_steps(model) | steps.parameter_rows(model)


def _residual(config: Any, directory: pathlib.Path) -> dict[str, str]:
    model = dataclasses.replace(steps.tiny_model(), residual=config(), num_layers=4)
    return steps.two_steps(model) | steps.parameter_rows(model)


def _objective(config: Any, directory: pathlib.Path) -> dict[str, str]:
    import numpy as np

    model, objective, rows = steps.tiny_model(), config(), steps.batch()
    attention = dataclasses.replace(model.attention, is_causal=config.name != "masked_diffusion")
    model = dataclasses.replace(model, attention=attention)
    if config.name == "policy_gradient":
        shape = rows.tokens.shape
        noise = np.random.default_rng(2).standard_normal((2, *shape)).astype(np.float32)
        extra = {"advantage": noise[0], "behavior_log_prob": -3.0 + 0.1 * noise[1]}
        extra |= {"reference_log_prob": extra["behavior_log_prob"]}
        rows = dataclasses.replace(rows, extra=extra)
    if config.name == "multi_token_prediction":
        from jaxmoe.contrib.multi_token_prediction.config import MultiTokenModulesConfig
        from jaxmoe.models.config import ModelOptions

        options = ModelOptions(predictor=MultiTokenModulesConfig(depth=2))
        model = dataclasses.replace(model, options=options)
    return _trained(model, objective=objective, rows=rows)


def _estimator(config: Any, directory: pathlib.Path) -> dict[str, str]:
    from jaxmoe import parameter_table

    small = {"seeds": 8, "directions": 2, "population": 8, "features": 16, "queries": 4}
    model, estimator = steps.with_parts(), steps.fitting(config, small)
    table = parameter_table(model)
    begin = {"gradients": estimator}
    return steps.two_steps(model, state_fields=begin, gradients=estimator, table=table)


def _adapter(config: Any, directory: pathlib.Path) -> dict[str, str]:
    """Two steps of the adapter, and the model with the adapter folded into its weights."""
    from jaxmoe.adapters import fold_adapters
    from jaxmoe.optim import adamw

    adapter = steps.fitting(config, ADAPTER_SIZES)
    model = dataclasses.replace(steps.tiny_model(), adapter=adapter)
    parts, state = steps.train_twice(model, optimizer=adamw(1e-2))
    try:
        weights = digest_of_tree(fold_adapters(state.params, adapter, model.layer_numbers))
    except ValueError:  # what is added depends on the token
        weights = "refused"
    return parts | steps.parameter_rows(model) | {"folded weights": weights}


def _model(changes: Any, directory: pathlib.Path) -> dict[str, str]:
    model = changes()
    return steps.two_steps(model) | steps.parameter_rows(model)


def _changed(**fields: Any) -> Any:
    return dataclasses.replace(steps.tiny_model(), **fields)


def _attention(**fields: Any) -> Any:
    model = steps.tiny_model()
    return dataclasses.replace(model, attention=dataclasses.replace(model.attention, **fields))


def _sized(capacity: Any) -> Any:
    """Return a capacity for 8 assignments an expert and row."""
    return None if capacity is None else capacity.sized_for(rows_per_expert=8.0)


def _capacity_member(config: Any, directory: pathlib.Path) -> dict[str, str]:
    return steps.two_steps(steps.with_parts(capacity=_sized(config())))


def _capacity(**fields: Any) -> Any:
    from jaxmoe.routing import CapacityConfig

    return steps.with_parts(capacity=CapacityConfig(factor=0.75, **fields))


def _hybrid() -> Any:
    """A period of a recurrent mixer and attention."""
    from jaxmoe.configs import registry_of
    from jaxmoe.layers.mixers import MixerBase
    from jaxmoe.models.config import LayerConfig

    mamba = steps.fitting(registry_of(MixerBase)["mamba2"], SIZES)
    return _changed(layers=(LayerConfig(mixer=mamba), LayerConfig()), num_layers=4)


def _looped() -> Any:
    from jaxmoe.contrib.depth.loop import LoopConfig

    return _changed(num_layers=4, dense_layers=(), loop=LoopConfig())


_MODELS = {
    "dense": lambda: _changed(moe=None, dense_layers=()),
    "tied_embeddings": lambda: _changed(has_tied_embeddings=True),
    "window": lambda: _attention(window=4, is_gated=True, softcap=5.0, qk_norm="full"),
    "shared_experts": lambda: steps.with_parts(num_shared_experts=1),
    "capacity_by_gate": _capacity,
    "capacity_by_position": lambda: _capacity(keep="position"),
    "hybrid": _hybrid,
    "looped": _looped,
}
