# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`sigmoid_topk` with bias, groups and scale against the router of `transformers` itself.

Needs the extra `hf` (PyTorch 2.13.0 for the CPU, on Python 3.11).
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.routing import (
    LossFreeConfig,
    RenormalizedGateConfig,
    SigmoidTopKConfig,
    SoftmaxGateConfig,
)
from jaxmoe.routing.routers.token_choice.groups import GroupLimitConfig
from tests.support.routing_inputs import by_token, drawn, route
from tests.support.tolerances import assert_close

pytestmark = [
    pytest.mark.slow,
    # Of PyTorch and transformers, about themselves.
    pytest.mark.filterwarnings("default"),
]

TOKENS, WIDTH, EXPERTS = 256, 24, 32


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers", reason="transformers is not installed: extra hf")
    return pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")


@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (8, 4), (4, 1), (4, 4)])
@pytest.mark.parametrize("is_renormalized", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_experts_weights_and_gradients(torch, num_groups, top_groups, is_renormalized, scale):
    """The same experts, weights, and gradients in the weight and in x."""
    # Imported here, where transformers is known to be there: without these two it is a failure.
    package = "transformers.models.deepseek_v3"
    modeling = importlib.import_module(f"{package}.modeling_deepseek_v3")
    configs = importlib.import_module(f"{package}.configuration_deepseek_v3")
    top_k = 8
    theirs = modeling.DeepseekV3TopkRouter(
        configs.DeepseekV3Config(
            hidden_size=WIDTH,
            n_routed_experts=EXPERTS,
            num_local_experts=EXPERTS,
            num_experts_per_tok=top_k,
            n_group=num_groups,
            topk_group=top_groups,
            norm_topk_prob=is_renormalized,
            routed_scaling_factor=scale,
        )
    )
    rng = np.random.default_rng(num_groups)
    weight = rng.normal(size=(EXPERTS, WIDTH)).astype(np.float32) / np.sqrt(WIDTH)
    bias = 0.2 * rng.normal(size=EXPERTS).astype(np.float32)
    x, cotangent = drawn(0, tokens=TOKENS, width=WIDTH), drawn(1, tokens=TOKENS, width=EXPERTS)
    theirs.weight.data = torch.tensor(weight)
    theirs.e_score_correction_bias.copy_(torch.tensor(bias))
    rows = torch.tensor(np.asarray(x), requires_grad=True)
    logits, weights, ids = theirs(rows)
    dense = torch.zeros(TOKENS, EXPERTS).scatter(1, ids, weights)
    (dense * torch.tensor(np.asarray(cotangent))).sum().backward()

    # Theirs takes the two best of a group, whatever K and M are.
    groups = GroupLimitConfig(num_groups=num_groups, top_groups=top_groups, best_per_group=2)
    config = SigmoidTopKConfig(bias=LossFreeConfig(), groups=groups)
    router = config.build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)
    gate = (RenormalizedGateConfig if is_renormalized else SoftmaxGateConfig)(scale=scale)

    def loss(params, x):
        output = route(router, params, x, state={"bias": jnp.asarray(bias)})
        gates = gate(output.selection, output.selection.scores).reshape(TOKENS, top_k)
        chosen = output.selection.expert_ids.reshape(TOKENS, top_k)
        of_token = jnp.arange(TOKENS)[:, None]
        ours = jnp.zeros((TOKENS, EXPERTS)).at[of_token, chosen].add(gates)
        return jnp.sum(ours * cotangent), (ours, output)

    params = {"weight": jnp.asarray(weight.T)}
    (of_params, of_x), (ours, output) = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    assert np.sort(by_token(output)[0], axis=1).tolist() == np.sort(ids.numpy(), axis=1).tolist()
    assert_close(output.logits, logits.detach().numpy(), "matmul")
    assert_close(ours, dense.detach().numpy(), "matmul")
    assert_close(of_params["weight"].T, theirs.weight.grad.numpy(), "matmul")
    assert_close(of_x, rows.grad.numpy(), "matmul")
