# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ten families: a model of transformers, ten steps of LoRA here, and back, with the same logits.

The adapter is read by peft over the model as it was, or is folded into a model of transformers.
Routers with expert biases are folded: training moves the biases, which no adapter of peft holds.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import finetune
from experiments.checkpoint import __main__ as checkpoint
from experiments.cli.flags import ExitCode
from jaxmoe import Transformer
from jaxmoe.run.load import load_run
from tests.support.huggingface_models import CONFIGS, build, outputs_of
from tests.support.runs import logged_losses

ATTENTION = ("attention_in", "attention_out")
ALL = (*ATTENTION, "expert_in", "expert_out")
WAYS = {
    "olmoe": ("peft", ALL),
    "mixtral": ("peft", ALL),
    "qwen3_moe": ("peft", ALL),
    "qwen2_moe": ("peft", ATTENTION),
    "deepseek_v3": ("folded", ALL),
    "glm4_moe": ("folded", ATTENTION),
    "ernie4_5_moe": ("folded", ATTENTION),
    "gpt_oss": ("peft", ATTENTION),
    "granitemoehybrid": ("folded", ALL),
    "qwen3_next": ("folded", ALL),
}
"""How the result is read, and the roles of the matrices that are adapted."""
SMALL = (
    *("--training.steps", "10", "--training.batch_size", "8", "--training.sequence_length", "16"),
    *("--schedule.warmup_steps", "0", "--optimizer.learning_rate", "0.03"),
    *("--evaluation.batches", "1", "--evaluation.every", "0", "--checkpoint.every", "10"),
    *("--tracking.trackers", "--tracking.sample_length", "0"),
    *("--execution.precision.compute", "float32", "--execution.rules", "data_parallel"),
)


def _logits(place, tokens, adapter=None):
    """Logits of transformers, under an adapter of peft if one is given."""
    import peft
    import transformers

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(place, **eager).eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    return outputs_of(model, tokens)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of PyTorch and transformers about their own use
@pytest.mark.parametrize("name", WAYS)
def test_a_tuned_model_of_a_family_has_our_logits_elsewhere(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft", reason="peft is not installed: extra hf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    way, roles = WAYS[name]
    config = copy.deepcopy(CONFIGS[name])
    build(config).save_pretrained(tmp_path / "base")
    rng = np.random.default_rng(0)
    np.save(tmp_path / "ids.npy", rng.integers(6, size=4000).astype(np.uint8))
    run = str(tmp_path / "run")
    data = ("data:files", "--data.path", str(tmp_path / "ids.npy"))
    adapter = ("--adapter.rank", "3", "--adapter.targets.roles", *roles)
    words = [str(tmp_path / "base"), *data, *adapter, *SMALL, "--run.directory", run]
    assert finetune.main(words) == ExitCode.DONE
    losses = [*logged_losses(tmp_path / "run").values()]
    assert losses[-1] < losses[0] - 0.02

    tokens = rng.integers(config["vocab_size"], size=(2, 11)).astype(np.int32)
    assembly, state, _ = load_run(run, None, needs_data=False)
    model = Transformer(assembly.plan.model)
    values = jax.device_get((state.params, state.router_state or None))
    params, router_state = jax.tree.map(jnp.asarray, values)
    ours = model.apply({"params": params}, jnp.asarray(tokens), router_state=router_state).logits
    before = _logits(tmp_path / "base", tokens)
    assert np.abs(np.asarray(ours) - before).max() > 1e-2

    convert = ["convert", run, "--to", str(tmp_path / way)]
    has_biases = name in ("deepseek_v3", "glm4_moe", "ernie4_5_moe")
    if has_biases:
        with pytest.raises(SystemExit):
            checkpoint.main([*convert, "--to_huggingface", "peft"])
        assert "has moved the biases of its routers" in capsys.readouterr().err
    if way == "peft":
        assert checkpoint.main([*convert, "--to_huggingface", "peft"]) == ExitCode.DONE
        theirs = _logits(tmp_path / "base", tokens, tmp_path / "peft")
    else:
        assert checkpoint.main([*convert, "--fold", "True"]) == ExitCode.DONE
        convert = ["convert", str(tmp_path / way), "--to", str(tmp_path / "whole")]
        assert checkpoint.main([*convert, "--to_huggingface", "auto"]) == ExitCode.DONE
        theirs = _logits(tmp_path / "whole", tokens)
    np.testing.assert_allclose(theirs, ours, atol=2e-4, rtol=2e-4)
