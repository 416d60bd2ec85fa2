# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Executions that cannot run are refused while a run is assembled, before anything is traced.

Each case was found by `python -m tests.fuzz --kind meshes`.
"""

import dataclasses

import pytest

from experiments import recipes
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.routing import METHODS
from jaxmoe.run.assemble import assemble
from jaxmoe.training import MaskedDiffusionConfig
from sharding import MeshConfig, MoEMesh
from sharding.expert_parallel import AllToAllConfig
from sharding.sequence_parallel import RingConfig, TokenRingConfig, UlyssesRingConfig


def config(method="mixtral", num_kv_heads=8, window=None, **execution):
    """Return a run of 24 sequences of 16 tokens, with 8 experts."""
    moe = MoEConfig(num_experts=8, top_k=2, expert_dim=16, **METHODS[method].parts())
    is_causal = moe.router.traits.is_causal
    run = recipes.markov(batch_size=24, sequence_length=16)
    objective = run.training.objective if is_causal else MaskedDiffusionConfig()
    return dataclasses.replace(
        run,
        model=ModelConfig(
            vocab_size=16,
            num_layers=1,
            embed_dim=16,
            attention=AttentionConfig(
                num_heads=8,
                num_kv_heads=num_kv_heads,
                head_dim=8,
                window=window,
                is_causal=is_causal,
            ),
            moe=moe,
        ),
        training=dataclasses.replace(run.training, objective=objective),
        execution=ExecutionConfig(**execution),
    )


EXPERTS = MeshConfig(data=2, expert=4)
REFUSED = {
    "chunks_by_expert": (
        config("expert_choice", mesh=EXPERTS, dispatcher=AllToAllConfig(num_chunks=2)),
        "num_chunks=2 cuts assignments by token, and this router gives them by expert: set it to 1",
    ),
    "chunks_of_slots": (
        config("soft_moe", mesh=EXPERTS, dispatcher=AllToAllConfig(num_chunks=2)),
        "num_chunks=2 cuts assignments by token, and this router gives them by expert: set it to 1",
    ),
    "chunks_of_tokens": (
        config(mesh=EXPERTS, dispatcher=AllToAllConfig(num_chunks=5)),
        "num_chunks=5 must divide the tokens of a device (48): choose a divisor, 1 for all at once",
    ),
    "usp_in_one_piece": (
        config(
            mesh=MeshConfig(data=4, seq=2),
            fold=MoEMesh(seq_inner=2),
            sequence_parallel=UlyssesRingConfig(),
        ),
        "the mesh has seq=2: set fold.seq_inner to 2, and fold.expert x fold.expert_tensor so that"
        " it cuts seq nowhere else; or take ulysses, which it is with one piece",
    ),
    "ring_of_one_head": (
        config(
            mesh=MeshConfig(data=1, seq=2, tensor=4),
            sequence_parallel=RingConfig(directions="both"),
            num_kv_heads=4,
        ),
        "directions='both' sends half of the key heads of a device each way, and it has 1: set it",
    ),
    "usp_of_one_head": (
        config(
            mesh=MeshConfig(data=2, seq=4),
            fold=MoEMesh(seq_inner=2),
            sequence_parallel=UlyssesRingConfig(directions="both"),
            num_kv_heads=2,
        ),
        "directions='both' sends half of the key heads of a device each way, and it has 1: set it",
    ),
    "window_both_ways": (
        config(
            mesh=MeshConfig(data=2, seq=4),
            sequence_parallel=RingConfig(layout="contiguous", directions="both"),
            window=5,
        ),
        "with model.attention.window=5 on layout 'contiguous': what a query sees is on one side",
    ),
    **{
        f"{form.name}_in_two_pieces": (
            config(mesh=MeshConfig(data=2, seq=4), fold=MoEMesh(expert=2), sequence_parallel=form),
            f"execution.fold cuts mesh.seq into seq_0=2 x seq_1=2, and execution.sequence_parallel"
            f" {form.name!r} needs it in one piece",
        )
        for form in (RingConfig(), TokenRingConfig())
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_executions_that_cannot_run_are_refused_before_tracing(name):
    run, text = REFUSED[name]
    with pytest.raises(ValueError) as error:
        assemble(run)
    assert text in str(error.value)


def test_the_same_executions_with_other_sizes_are_accepted():
    assemble(config(mesh=EXPERTS, dispatcher=AllToAllConfig(num_chunks=2)))
    assemble(config(mesh=MeshConfig(data=2, seq=4), sequence_parallel=RingConfig()))
