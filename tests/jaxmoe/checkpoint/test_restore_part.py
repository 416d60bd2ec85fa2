# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of checkpoints, and other layouts: the same bits, or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.checkpoint import CheckpointDamagedError, CheckpointError, checksums, save_checkpoint
from jaxmoe.checkpoint.mapping import Replicated, Unpad
from jaxmoe.checkpoint.restore import restore_part
from tests.support.meshes import mesh_named


def _state():
    rng = np.random.default_rng(0)
    return {
        "params": {
            "embedding": {"weight": rng.standard_normal((16, 8)).astype(np.float32)},
            "head": {"weight": rng.standard_normal((8, 16)).astype(np.float32)},
        },
        "opt_state": {"0": {"count": np.int32(3)}},
        "rng": jax.random.key(5),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    mesh = mesh_named("data8")
    params = jax.device_put(_state()["params"], NamedSharding(mesh, PartitionSpec("data")))
    rng = jax.device_put(_state()["rng"], NamedSharding(mesh, PartitionSpec()))
    save_checkpoint(directory, _state() | {"params": params, "rng": rng}, step=4, config={})
    return directory


def test_restore_part_of_parameters_on_another_mesh(saved, caplog):
    caplog.set_level("INFO", "jaxmoe")
    mesh = mesh_named("data4_tensor2")
    spec = NamedSharding(mesh, PartitionSpec(None, ("data", "tensor")))
    target = {
        "params": jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spec), _state()["params"]
        )
    }
    restored = restore_part(saved, target)
    jax.tree.map(np.testing.assert_array_equal, restored["params"], _state()["params"])
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {spec}
    assert "not read: opt_state, rng" in caplog.text


def test_restore_part_of_one_array_and_a_key(saved):
    restored = restore_part(
        saved, {"params": {"head": {"weight": jnp.zeros((8, 16))}}, "rng": jax.random.key(0)}
    )
    np.testing.assert_array_equal(
        restored["params"]["head"]["weight"], _state()["params"]["head"]["weight"]
    )
    assert (
        jax.random.key_data(restored["rng"]).tolist()
        == jax.random.key_data(jax.random.key(5)).tolist()
    )


def test_restore_part_casts_only_if_allowed(saved):
    target = {"params": {"head": {"weight": jnp.zeros((8, 16), jnp.bfloat16)}}}
    with pytest.raises(CheckpointError, match="saved float32, wanted bfloat16, not cast unless"):
        restore_part(saved, target)
    cast = restore_part(saved, target, is_cast_allowed=True)["params"]["head"]["weight"]
    np.testing.assert_array_equal(cast, _state()["params"]["head"]["weight"].astype(jnp.bfloat16))


def test_restore_part_lists_all_missing_arrays(saved):
    target = {
        "params": {
            "heads": {"weight": jnp.zeros((8, 16))},
            "embedding": {"weight": jnp.zeros((16, 9))},
        }
    }
    with pytest.raises(CheckpointError) as error:
        restore_part(saved, target)
    assert str(error.value) == (
        f"{saved}/4 lacks what is wanted (2 arrays):\n"
        "  params/embedding/weight: saved float32[16,8], wanted float32[16,9]\n"
        "  params/heads/weight: not in the checkpoint (it has params/head/weight)"
    )


def test_restore_part_from_another_layout(tmp_path):
    """Two ranks of a padded embedding and of replicated gains, as another framework saves them."""
    rng = np.random.default_rng(1)
    table, gains = rng.standard_normal((10, 4)).astype(np.float32), np.ones(4, np.float32)
    padded = np.split(np.concatenate([table, np.zeros((2, 4), np.float32)]), 2)
    foreign = {f"rank{r}": {"wte": padded[r], "norm": gains} for r in range(2)}
    save_checkpoint(tmp_path, foreign, step=1, config={})
    norm = Replicated("rank{r}/norm", "params/norm/scale")
    rules = [Unpad("rank{r}/wte", "params/embedding/weight", axis=0, size=10), norm]
    target = {
        "params": {"embedding": {"weight": jnp.zeros((10, 4))}, "norm": {"scale": jnp.zeros(4)}}
    }
    restored = restore_part(tmp_path, target, mapping=rules)["params"]
    np.testing.assert_array_equal(restored["embedding"]["weight"], table)
    np.testing.assert_array_equal(restored["norm"]["scale"], gains)
    foreign["rank1"]["wte"] = padded[1].astype(np.float16)
    save_checkpoint(tmp_path, foreign, step=2, config={})
    with pytest.raises(CheckpointError, match="saved float16 and float32, wanted float32, not"):
        restore_part(tmp_path, target, step=2, mapping=rules)
    with pytest.raises(CheckpointError, match=r"merged to \[11, 4\], and the target has \[10, 4\]"):
        wrong = [Unpad("rank{r}/wte", "params/embedding/weight", axis=0, size=11), norm]
        restore_part(tmp_path, target, step=1, mapping=wrong)


def test_restore_part_detects_damage(saved, tmp_path):
    import json
    import shutil

    shutil.copytree(saved, tmp_path / "copy")
    path = tmp_path / "copy" / "4" / "manifest" / "metadata"
    manifest = json.loads(path.read_text())
    manifest["fingerprints"]["params/head/weight"] = "0" * 16
    path.write_text(json.dumps(manifest))
    checksums.write_list(tmp_path / "copy" / "4")
    target = {"params": {"head": {"weight": jnp.zeros((8, 16))}}}
    with pytest.raises(
        CheckpointDamagedError, match="have changed since they were saved: params/head/weight"
    ):
        restore_part(tmp_path / "copy", target)
    assert restore_part(tmp_path / "copy", target, verify="files") is not None
