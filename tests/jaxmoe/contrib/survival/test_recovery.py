# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lost layers are means of their neighbours, and everything that survives is bitwise the same."""

import dataclasses
import functools
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding

from experiments.cli import flags as cli
from experiments.recipes import DEFAULT, RECIPES
from jaxmoe.checkpoint import (
    CheckpointAbandonedError,
    CheckpointError,
    save_checkpoint,
)
from jaxmoe.checkpoint.manifest import check_target, make_manifest
from jaxmoe.checkpoint.optional_parts import with_optional, without_optional
from jaxmoe.contrib.survival import recovery
from jaxmoe.contrib.survival.layer_norms import LayerNorms, VocabularyMirror
from jaxmoe.contrib.survival.neighbours import sources_of
from jaxmoe.contrib.survival.recovery import (
    restore_averaged,
    restore_averaged_snapshot,
    with_raised_rate,
)
from jaxmoe.contrib.survival.snapshot_store import SnapshotStore
from jaxmoe.contrib.survival.surviving import Survivors, inside, open_surviving, overlap, survey
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig
from jaxmoe.run.assemble import assemble
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.guard import no_norms
from jaxmoe.training.parts.base import run_after
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import Step
from sharding import MeshConfig
from tests.support.meshes import mesh_of
from tests.support.runs import flags
from tests.support.stage_files import lose_stage, split_by_stage

STAGES, LAYERS = 4, 4
MODEL = ModelConfig(
    vocab_size=16,
    num_layers=LAYERS,
    embed_dim=8,
    dense_dim=8,
    moe=None,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4, qk_norm="none"),
)
EXECUTION = ExecutionConfig(mesh=MeshConfig(stage=STAGES, data=2))
TABLE = parameter_table(MODEL, rules=EXECUTION.axis_rules)
STEP = Step(model=MODEL, optimizer=optax.sgd(1.0), execution=EXECUTION)
NORMS = np.asarray([3.0, 100.0, 1.0, 2.0], np.float32)
CONFIG = {"execution": {"mesh": {"stage": STAGES}}}
WEIGHTS = (3.0 + 1e-4) / (4.0 + 2e-4), (1.0 + 1e-4) / (4.0 + 2e-4)


def _state(seed: int, step: int) -> TrainState:
    rng, mesh = np.random.default_rng(seed), mesh_of(EXECUTION)

    def place(row):
        values = rng.standard_normal(row.shape).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, row.spec))

    adam = optax.ScaleByAdamState(count=jnp.int32(step), mu=TABLE.tree(place), nu=TABLE.tree(place))
    params = TABLE.tree(place)
    state = TrainState(
        step=jnp.int32(step),
        params=params,
        opt_state=(adam,),
        router_state={},
        rng=jax.random.key(seed),
        skipped=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
        recent_norms=no_norms(),
        parts={
            "layer_norms": jnp.asarray(NORMS),
            "mirror": {name: params[name] for name in ("embedding", "head")},
        },
    )
    with jax.set_mesh(mesh):
        state = jax.jit(functools.partial(VocabularyMirror().settle, STEP))(state, state)
    whole = NamedSharding(mesh, jax.P())
    return jax.tree.map(lambda x: x if len(x.devices()) > 1 else jax.device_put(x, whole), state)


def _flat(tree) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in traverse_util.flatten_dict(tree, sep="/").items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A step as four processes write it, among the damaged ones, and its state."""
    directory, state = tmp_path_factory.mktemp("saved"), _state(0, 7)
    save_checkpoint(directory, state, step=7, config=CONFIG)
    shelf = directory / "damaged"
    shelf.mkdir()
    (directory / "7").rename(shelf / "7")
    split_by_stage(shelf / "7", STAGES)
    return shelf, state


@pytest.fixture
def shelf(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "damaged")
    return tmp_path / "damaged"


def _restore(shelf, check=lambda manifest: None):
    return restore_averaged(shelf, _state(1, 0), TABLE, check)


@pytest.mark.parametrize(
    ("stage", "sources"), [(1, ((0, WEIGHTS[0]), (2, WEIGHTS[1]))), (3, ((2, 1.0),))]
)
def test_a_lost_stage_is_the_weighted_mean_of_its_neighbours(stage, sources, shelf, saved, caplog):
    """At the end, a copy of the only neighbour; everything else survives or is new."""
    caplog.set_level(logging.WARNING, "jaxmoe")
    lose_stage(shelf / "7", stage)
    found, old, new = _restore(shelf), saved[1], _state(1, 0)
    assert found is not None and found.step == 7
    assert int(found.state.step) == int(found.state.opt_state[0].count) == 7
    assert f"layer {stage} is " in caplog.text
    assert "32 of 128 values of params/head/weight are from their copy" in caplog.text
    assert "are new" not in caplog.text
    _check(found.state, old, new, {stage: sources})
    for path, array in _flat(found.state.params).items():
        assert array.dtype == np.float32, path
    layout = jax.tree.map(lambda x: x.sharding, found.state.params)
    assert layout == jax.tree.map(lambda x: x.sharding, new.params)


def _check(found, old, new, sources):
    """Lost layers are means; their rows of the vocabulary survive, and moments of both are new."""
    names = {row.path for row in TABLE if row.declaration.axes[:1] == ("layers",)}
    trees = ("params", lambda s: s.params), ("mu", lambda s: s.opt_state[0].mu)
    for kind, of in trees:
        before, initial, after = (_flat(of(s)) for s in (old, new, found))
        for path, array in after.items():
            wanted = before[path].copy()
            for stage, made_of in sources.items():
                if path in names and kind == "params":
                    values = (w * before[path][s].astype(np.float64) for s, w in made_of)
                    wanted[stage] = sum(values)
                elif path in names:
                    wanted[stage] = initial[path][stage]
                elif path in ("embedding/weight", "head/weight") and kind == "mu":
                    rows = slice(4 * stage, 4 * stage + 4)
                    rows = (slice(None), rows) if path.startswith("head") else rows
                    wanted[rows] = initial[path][rows]
            np.testing.assert_array_equal(array, wanted, err_msg=f"{kind}/{path}")


def test_rows_are_new_where_their_copy_is_lost_too(shelf, saved, caplog):
    """Half of the copy of the rows of stage 1, which stage 2 keeps, lies beside what is lost."""
    caplog.set_level(logging.WARNING, "jaxmoe")
    lose_stage(shelf / "7", 1)
    found, new = survey(shelf / "7"), _state(1, 0)
    boxes = found.lost["params/embedding/weight"]
    assert {box[0] for box in boxes} == {(4, 8)}
    mirrored = found.lost["parts/mirror/embedding/weight"]
    assert {box[0] for box in mirrored} == {(4, 8)}  # rows 0 to 3
    half = ((8, 10), (0, 8))
    path = "parts/mirror/embedding/weight"
    found = dataclasses.replace(found, lost=found.lost | {path: (*mirrored, half)})

    class Fewer(Survivors):
        def __init__(self, rest):
            self.survey, self._rest = found, rest

        def read(self, path, box, instead):
            values = self._rest.read(path, box, instead)
            if path == "parts/mirror/embedding/weight" and (both := overlap(box, half)) is not None:
                values[inside(both, box)] = instead[inside(both, box)]
            return values

    with open_surviving(survey(shelf / "7")) as rest:
        restored = recovery._restore(Fewer(rest), new, TABLE, "here").state
    wanted = np.asarray(saved[1].params["embedding"]["weight"]).copy()
    wanted[4:6] = np.asarray(new.params["embedding"]["weight"])[4:6]
    np.testing.assert_array_equal(restored.params["embedding"]["weight"], wanted)
    assert "16 of 128 values of params/embedding/weight are from their copy" in caplog.text
    assert "16 of 128 values of params/embedding/weight are new" in caplog.text


def test_a_state_with_copies_is_restored_where_none_are_kept_and_back(caplog):
    state = _state(0, 7)
    mirror = np.asarray(state.parts["mirror"]["embedding"]["weight"])
    for stage, rows in enumerate(np.split(mirror, STAGES)):
        whole = np.split(np.asarray(state.params["embedding"]["weight"]), STAGES)
        np.testing.assert_array_equal(rows, whole[stage - 1])
    bare = dataclasses.replace(state, parts={"layer_norms": state.parts["layer_norms"]})
    for kept, target in ((state, bare), (bare, state)):
        manifest = make_manifest(kept, step=7, config=CONFIG, data={})
        wanted = without_optional(manifest, target)
        check_target(manifest, wanted, "the step")
        found = with_optional(manifest, kept, target, "the step")
        assert jax.tree.structure(found) == jax.tree.structure(target)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(found.parts.get("mirror")))
    assert "rows of the vocabulary of the stages before" in caplog.text


def _store(directory):
    own = {process: directory / f"process{process}" for process in range(STAGES)}
    return SnapshotStore(own, run="run", process_of=lambda device: device.id // 2)


def test_a_snapshot_that_lost_two_stages_is_averaged(tmp_path, caplog):
    """The fullest is shared through files, not a newer one of which more is lost."""
    caplog.set_level(logging.WARNING, "jaxmoe")
    state, new, shared = _state(0, 7), _state(1, 0), tmp_path / "shared"
    store = _store(tmp_path)
    for step in (7, 9):
        store.save(step, state, config=CONFIG, data={})
        store.finish()
    for process in range(1, STAGES):  # the last snapshot was being written
        shutil.rmtree(tmp_path / f"process{process}" / "9")
    for process in (1, 3):
        shutil.rmtree(tmp_path / f"process{process}")
    assert store.restore_newest(new) is None
    given = shared, new, TABLE, lambda manifest: None
    found = restore_averaged_snapshot(_store(tmp_path), *given)
    assert found is not None and found.step == 7 and not shared.exists()
    _check(found.state, state, new, {1: ((0, WEIGHTS[0]), (2, WEIGHTS[1])), 3: ((2, 1.0),)})
    assert int(found.state.opt_state[0].count) == 7
    assert (jax.random.key_data(found.state.rng) == jax.random.key_data(state.rng)).all()
    shutil.rmtree(tmp_path / "process2")
    assert restore_averaged_snapshot(_store(tmp_path), *given) is None
    assert "layers 1 to 3 of 4 are lost" in caplog.text and not shared.exists()
    shutil.rmtree(tmp_path / "process0")
    assert restore_averaged_snapshot(_store(tmp_path), *given) is None


def test_the_rate_is_raised_once_for_each_step_that_was_averaged(tmp_path):
    words = ("--parts", "check_free", "--check_free.recovery_steps", "3")
    _, config = cli.parse(RECIPES, DEFAULT, flags(tmp_path, 12, *words), "pretrain", "")
    plain = assemble(config)
    raised = plain
    for steps in ((4,), (4,), (6,)):
        raised = with_raised_rate(raised, steps)
    both = with_raised_rate(plain, (4, 6))
    for assembly in (raised, both):
        counts = jnp.arange(12)
        factor = jax.vmap(assembly.plan.schedule)(counts) / jax.vmap(plain.plan.schedule)(counts)
        np.testing.assert_allclose(factor, [1.0] * 4 + [1.1] * 5 + [1.0] * 3, rtol=1e-6)
    assert with_raised_rate(plain, ()) is plain


def test_changed_bits_count_as_lost(shelf, saved):
    """Only the file with the wrong checksum is left out."""
    files = (shelf / "7" / "state" / "ocdbt.process_2" / "d").iterdir()
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    found = survey(shelf / "7")
    assert all(
        box[0] == (2, 3) for path in found.lost if "blocks" in path for box in found.lost[path]
    )
    assert found.num_lost("params/embedding/weight") == 4 * 8
    with open_surviving(found) as survivors:
        read = survivors.read(
            "params/embedding/weight", ((2, 12), (1, 8)), np.full((10, 7), 5.0, np.float32)
        )
    wanted = np.asarray(saved[1].params["embedding"]["weight"])[2:12, 1:].copy()
    wanted[6:] = 5.0
    np.testing.assert_array_equal(read, wanted)


@pytest.mark.parametrize(
    ("lost", "message"),
    [((1, 2), "layers 1 to 2 of 4 are lost, and neither"), ((), "files.json is missing")],
)
def test_too_much_damage_is_refused(shelf, lost, message):
    for stage in lost:
        lose_stage(shelf / "7", stage)
    if not lost:
        (shelf / "7" / "files.json").unlink()
    with pytest.raises(CheckpointError, match=message) as refused:
        _restore(shelf)
    assert "parts:check_free cannot replace what is lost" in str(refused.value)


def test_abandoned_steps_are_not_restored(shelf, tmp_path):
    def abandon(manifest):
        raise CheckpointAbandonedError("skipped since")

    assert _restore(shelf, abandon) is None
    assert _restore(tmp_path / "nothing") is None


def test_sources_follow_lost_layers():
    """A stage of two layers, and the stages of a ring: each as many layers before and after."""
    norms = np.arange(1.0, 9.0)
    g, h = np.hypot(1, 2) + 1e-4, np.hypot(5, 6) + 1e-4
    pair = {2: ((0, g / (g + h)), (4, h / (g + h))), 3: ((1, g / (g + h)), (5, h / (g + h)))}
    found = sources_of({3, 2}, norms)
    assert found.keys() == pair.keys()
    for layer, sources in pair.items():
        np.testing.assert_allclose(found[layer], sources, rtol=1e-12)
    assert sources_of({0, 1}, norms) == {0: ((2, 1.0),), 1: ((3, 1.0),)}
    assert sources_of({1, 3}, norms[:4])[3] == ((2, 1.0),)
    assert sources_of({1}, np.zeros(3)) == {1: ((0, 0.5), (2, 0.5))}
    with pytest.raises(ValueError, match="layers 0 to 2 of 4 are lost"):
        sources_of({0, 1, 2}, norms[:4])


def test_norms_of_layers_are_those_of_the_gradients():
    state = _state(0, 3)
    grads = state.params
    total = sum(
        np.square(np.asarray(x).reshape(LAYERS, -1)).sum(1)
        for path, x in traverse_util.flatten_dict(grads, sep="/").items()
        if "blocks" in path
    )
    with jax.set_mesh(mesh_of(EXECUTION)):
        keep = jax.jit(functools.partial(run_after, (LayerNorms(),), STEP, state))
        good, bad = (
            keep(state, grads, is_good).parts["layer_norms"]
            for is_good in (jnp.bool_(True), jnp.bool_(False))
        )
    np.testing.assert_allclose(good, np.sqrt(total), rtol=1e-6)
    np.testing.assert_array_equal(bad, NORMS)
    assert good.sharding.is_equivalent_to(state.parts["layer_norms"].sharding, 1)
