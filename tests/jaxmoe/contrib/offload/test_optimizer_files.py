# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""An optimiser state in files gives the same training, of which memory holds a few parts."""

import dataclasses
import errno
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.offload import part_files
from jaxmoe.contrib.offload.files_step import OptimizerFilesError, UpdateFromFiles, open_files
from jaxmoe.contrib.offload.part_files import PartFiles
from jaxmoe.contrib.rl.objective import PolicyGradientConfig
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.scaling import standard
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import init_state
from jaxmoe.training.step import Step
from tests.support.tolerances import assert_close

MODEL = ModelConfig(
    vocab_size=16,
    num_layers=8,
    embed_dim=16,
    attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=16),
    moe=None,
    dense_dim=32,
)
FILES = ExecutionConfig(offload=OffloadConfig(optimizer="files", parts=8))
STEPS = 3


class PartsInMemory(PartFiles):
    """The same parts in arrays."""

    def __init__(self, files: PartFiles):
        vars(self).update(vars(files))
        self._arrays: dict[tuple[int, int], dict[int, np.ndarray]] = {}

    def store(self, number: int, place: int, array: np.ndarray) -> None:
        self._arrays.setdefault((number, self.version % 2), {})[place] = np.array(array)

    def load(self, number: int) -> list[np.ndarray]:
        arrays = self._arrays[number, self.version % 2]
        return [arrays[place].copy() for place in sorted(arrays)]

    def store_next(self, number: int, arrays: Any) -> None:
        kept = {place: np.array(array) for place, array in enumerate(arrays)}
        self._arrays[number, (self.version + 1) % 2] = kept

    def piece(self, number: int, place: int) -> np.ndarray:
        return self._arrays[number, self.version % 2][place].copy()


def batch(seed: int, weight: float = 1.0) -> Batch:
    tokens = np.random.default_rng(seed).integers(0, MODEL.vocab_size, (2, 9))
    weights = jnp.full((2, 8), weight, jnp.float32)
    tokens = jnp.asarray(tokens, jnp.int32)
    return Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], loss_weights=weights)


class Training:
    """A model with a state in files, or in device memory, and its compiled step."""

    def __init__(
        self,
        execution: ExecutionConfig,
        directory: Any = None,
        model: Any = MODEL,
        **options: Any,
    ):
        self.model, table = model, parameter_table(model, standard(model))
        self.optimizer = AdamWConfig().build(table, LinearConfig().build(8))
        self.execution, self.table = execution, table
        step = Step(model=model, optimizer=self.optimizer, execution=execution, **options)
        self.files: PartFiles | None = None
        if directory is not None:
            self.files = open_files(str(directory), step, self.state())
            step = dataclasses.replace(step, update=UpdateFromFiles(files=self.files))
        self.step = step.jit_step()

    def state(self) -> Any:
        key = jax.random.key(0)
        return init_state(self.model, self.optimizer, key, execution=self.execution)

    def trained(self) -> Any:
        """State after the steps, on the host, and the metrics of each."""
        state, found = self.state(), []
        for number in range(STEPS):
            state, metrics = self.step(state, batch(number))
            found.append(metrics)
        return on_host(state), found


def on_host(state: Any) -> Any:
    return jax.tree.map(np.asarray, (state.params, state.opt_state))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Training from files, its state after the steps, and its metrics."""
    training = Training(FILES, tmp_path_factory.mktemp("optimizer"))
    state, metrics = training.trained()
    yield training, state, metrics
    assert training.files is not None  # a directory was given
    training.files.close()


def contents(files: PartFiles) -> list[bytes]:
    numbers = range(len(files.layouts))
    return [files.path(number, files.version).read_bytes() for number in numbers]


def test_training_from_files_is_that_in_device_memory(files):
    whole, metrics = Training(ExecutionConfig()).trained()
    assert_close(files[1], whole, "end_to_end")
    np.testing.assert_allclose(
        [float(one.loss) for one in files[2]], [float(one.loss) for one in metrics], rtol=1e-6
    )


def test_training_from_files_is_bitwise_that_from_memory(files):
    """The same programs with the parts in arrays; one program of all rounds otherwise."""
    training, state, _ = files
    inner = training.step._jitted
    held, inner._files = inner._files, PartsInMemory(inner._files)
    try:
        again, _ = training.trained()
    finally:
        inner._files = held
    jax.tree.map(np.testing.assert_array_equal, again, state)


@pytest.mark.large
def test_training_from_files_is_bitwise_that_in_device_memory(tmp_path):
    """Operation by operation: compiled programs contract a * b + c to one rounding or to two."""
    model = dataclasses.replace(MODEL, num_layers=2)
    with jax.disable_jit():
        ours, _ = Training(FILES, tmp_path, model).trained()
        theirs, _ = Training(ExecutionConfig(), model=model).trained()
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_step_reads_and_writes_both_moments_once(files):
    training, _, metrics = files
    moments = 2 * 4 * training.table.total
    assert training.files.size == moments
    for one in metrics:
        assert (one.disk["bytes_read"], one.disk["bytes_written"]) == (moments, moments)


def test_host_memory_holds_three_parts(files):
    """Fewer than two of eleven parts means that nothing is read ahead; the whole fails too."""
    held, sizes = files[0].files.buffers, [layout.length for layout in files[0].files.layouts]
    assert len(sizes) == 11
    assert 2 * min(sizes[:8]) <= held.most < 4 * max(sizes) < sum(sizes) / 1.5
    assert held.bytes == 0


@pytest.mark.parametrize("is_late", [False, True])
def test_a_refused_step_leaves_the_files_untouched(files, is_late, monkeypatch):
    training, store = files[0], files[0].files
    state, _ = training.step(training.state(), batch(0))
    before, kept = contents(store), on_host(state)
    if is_late:  # a gradient whose square is infinite, behind a norm that was accepted
        begin = training.step._jitted._begin

        def spoiled(*given):
            begun, grads = begin(*given)
            return begun, grads | {"final_norm": {"gain": grads["final_norm"]["gain"] * 1e30}}

        monkeypatch.setattr(training.step._jitted, "_begin", spoiled)
    after, metrics = training.step(state, batch(1, 1.0 if is_late else float("nan")))
    assert bool(metrics.is_skipped) and contents(store) == before
    jax.tree.map(np.testing.assert_array_equal, on_host(after), kept)
    first = store.layouts[0].size
    wanted = (store.size, store.size) if is_late else (first, 0)
    assert (metrics.disk["bytes_read"], metrics.disk["bytes_written"]) == wanted


@pytest.mark.slow
def test_answers_without_an_advantage_leave_the_files_untouched(tmp_path):
    """As in device memory, and the step counts as made: weight decay alone would move all."""
    training = Training(FILES, tmp_path, objective=PolicyGradientConfig())
    store: Any = training.files

    def answers(advantage: float) -> Batch:
        signs = advantage * jnp.asarray([1.0, -1.0])[:, None] * jnp.ones((2, 8))
        extra = {"advantages": signs, "old_log_probs": jnp.full((2, 8), -3.0)}
        return dataclasses.replace(batch(0), extra=extra)

    try:
        state, _ = training.step(training.state(), answers(1.0))
        before, kept = contents(store), on_host(state)
        after, metrics = training.step(state, answers(0.0))
        assert not bool(metrics.is_skipped) and int(after.step) == 2
        assert contents(store) == before
        jax.tree.map(np.testing.assert_array_equal, on_host(after), kept)
    finally:
        store.close()


def test_a_state_in_memory_goes_to_the_files_and_is_freed(files):
    training = files[0]
    state = training.state()
    arrays = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    after, _ = training.step(state, batch(0))
    assert arrays and all(leaf.is_deleted() for leaf in arrays)
    kept = [leaf for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim]
    assert [leaf.shape for leaf in kept] == [leaf.shape for leaf in arrays]
    assert not any(isinstance(leaf, jax.Array) or leaf.is_deleted() for leaf in kept)


def test_an_error_of_the_disk_leaves_the_state_of_the_step_before(files, monkeypatch):
    training = files[0]
    state, _ = training.step(training.state(), batch(0))
    before, write = on_host(state), PartFiles.store_next

    def failing(self, number, arrays):
        if number == 5:
            raise OSError(errno.EIO, "Input/output error")
        write(self, number, arrays)

    with monkeypatch.context() as patched:
        patched.setattr(PartFiles, "store_next", failing)
        with pytest.raises(OptimizerFilesError, match="cannot be read or written"):
            training.step(state, batch(1))
    jax.tree.map(np.testing.assert_array_equal, on_host(state), before)
    training.step(state, batch(1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)


def test_a_disk_without_space_is_an_error_at_the_start(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(part_files.os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"needs 0\.\d MB in .*No space left.*offload.directory"):
        Training(FILES, tmp_path)


def test_a_directory_that_cannot_be_made_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        Training(FILES, tmp_path / "file" / "optimizer")


def test_a_directory_belongs_to_one_run(files):
    with pytest.raises(ValueError, match="another run"):
        PartFiles(files[0].files.directory, files[0].files.layouts)


def test_the_compiled_step_says_what_its_largest_program_needs(files):
    """A run asks its compiled step, as any program of JAX."""
    training, _, _ = files
    compiled = training.step.lower(training.state(), batch(0)).compile()
    traced = training.step.trace(training.state(), batch(0))
    alone = traced.lower().compile().memory_analysis()
    assert compiled.memory_analysis().temp_size_in_bytes == alone.temp_size_in_bytes > 0
