# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computing a step twice finds a device that computes wrongly; a third run classifies it."""

import json

import jax
import numpy as np
import pytest

from experiments import pretrain
from experiments.cli import flags as cli
from experiments.cli.flags import ExitCode
from experiments.recipes import DEFAULT, RECIPES
from jaxmoe.contrib.survival.recompute import ComputationDiffersError, RecomputedStep, verdict
from jaxmoe.fingerprints import ShardFingerprint
from jaxmoe.run import trainer
from jaxmoe.run.assemble import assemble
from jaxmoe.run.compile import compile_steps
from jaxmoe.state_tree import is_key
from tests.support.runs import flags

TRIALS = 20


def _alter(state, rng):
    """Flip one random bit of one shard; return array and device."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(state.params))
    path = list(leaves)[rng.integers(len(leaves))]
    array = leaves[path]
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    odd = int(rng.integers(len(shards)))
    words = shards[odd].reshape(-1).view(np.uint32)
    words[rng.integers(words.size)] ^= np.uint32(1 << int(rng.integers(32)))
    devices = [shard.device for shard in array.addressable_shards]
    placed = [jax.device_put(*pair) for pair in zip(shards, devices, strict=True)]
    altered = jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)
    params = jax.tree_util.tree_map_with_path(
        lambda p, leaf: altered if p == path else leaf, state.params
    )
    name = "/".join(str(part.key) for part in path)
    return state.replace(params=params), f"params/{name}", devices[odd].id


class _Faulty:
    """A step that is altered at some calls."""

    def __init__(self, step):
        self._step, self._rng = step, np.random.default_rng(0)
        self.calls, self.bad, self.where = 0, set(), []

    def __call__(self, state, batch):
        self.calls += 1
        state, metrics = self._step(state, batch)
        if self.calls in self.bad:
            state, *where = _alter(state, self._rng)
            self.where.append(where)
        return state, metrics


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1, 2, 2), "transient, two of three results agree), in 1 of 2 arrays: b"),
        ((1, 2, 1), "transient, two of three results agree), in 1 of 2 arrays: b"),
        ((1, 2, 3), "persistent, no two of three results agree), in 1 of 2 arrays: b"),
    ],
)
def test_the_verdict_names_device_and_array(values, words):
    same = ShardFingerprint(device=0, index=((0, 2),), value=7)
    odd = [ShardFingerprint(device=3, index=((2, 4),), value=value) for value in values]
    prints = [{"a": [same], "b": [same, shard]} for shard in odd]
    text = verdict(*prints)
    assert text.startswith("device 3: computed other bits from the same state and batch (")
    assert text.endswith(words)


@pytest.mark.slow
def test_every_altered_value_is_found_and_none_in_clean_steps(tmp_path):
    """20 of 20 and 0 of 20; the state goes on as if each step had been computed once."""
    command = flags(tmp_path, 100, "--execution.mesh.data", "4", "--execution.mesh.expert", "2")
    _, config = cli.parse(RECIPES, DEFAULT, command, "test", "")
    assembly = assemble(config)
    with jax.set_mesh(assembly.mesh):
        state, plain, batch = assembly.new_state(), assembly.new_state(), assembly.feed.batch(0)
        compiled = compile_steps(assembly, 0, state)
        faulty = _Faulty(compiled)
        checked = RecomputedStep(faulty, 1, 0)
        for _ in range(TRIALS):
            state, _ = checked(state, batch)
            plain, _ = compiled(plain, batch)
        assert faulty.calls == 2 * TRIALS
        for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(_bits(one), _bits(other))
        fields = {field: getattr(plain, field) for field in plain.__dataclass_fields__}
        fields["rng"] = jax.random.key_data(fields["rng"])
        places = jax.tree.map(lambda leaf: leaf.sharding, fields)
        host = jax.device_get(fields)
        for trial in range(TRIALS):
            kind = ("first", "second", "two")[trial % 3]
            calls = {"first": (1,), "second": (2,), "two": (1, 3)}[kind]
            faulty.calls, faulty.bad, faulty.where = 0, set(calls), []
            with pytest.raises(ComputationDiffersError) as error:
                checked(plain.replace(**_placed(host, places)), batch)
            text = str(error.value)
            devices = text.removeprefix("device ").partition(":")[0].split(" and ")
            assert str(faulty.where[0][1]) in devices and faulty.where[0][0] in text
            assert ("persistent" if kind == "two" else "transient") in text
            assert kind == "two" or (len(devices) == 1 and "in 1 of" in text)


def _placed(host, places):
    fields = jax.device_put(host, places)
    return fields | {"rng": jax.random.wrap_key_data(fields["rng"])}


def _bits(leaf):
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


@pytest.mark.slow
def test_a_run_on_such_a_device_ends(tmp_path, caplog, monkeypatch):
    def faulty_steps(*arguments):
        faulty = _Faulty(compile_steps(*arguments))
        faulty.bad = {5}  # of steps 1, 2, 2 again, 3, 4, 4 again
        return faulty

    monkeypatch.setattr(trainer, "compile_steps", faulty_steps)
    more = ("--checkpoint.every", "2", "--recomputation.every", "2", "--execution.mesh.data", "8")
    assert pretrain.main(flags(tmp_path / "run", 6, *more)) == ExitCode.CORRUPTED
    assert "step 4: device" in caplog.text and "transient" in caplog.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["checkpoint_step"]) == ("corrupted", 3, 2)
