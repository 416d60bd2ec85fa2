# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Loads batches as a pure function of seed and global step, on any number of hosts.

Step t of batch size B holds rows t*B to t*B + B - 1 of an endless sequence (if batches grow, the
rows after those of all earlier steps). Each epoch visits every row of the split once, in its own
order; an unlimited source is read sequentially. Hosts take consecutive, equal parts of the batch,
so that the parts of 1, 2 or 4 hosts concatenate to the same batch. There is no state to restore: a
checkpoint keeps the step and the fingerprint (`position`), and `check_position` raises if a run
resumes with other data. Skipped rows (`skipped`) are part of the position, the number of hosts is
not.

Rows that have a task give `Batch.extra["task"]`, the same number at all positions of a row.

In a packed row, `positions` restart at the first token of each document, and `loss_weights` are 0
where the target belongs to another document than the token, or to padding.

The validation split is neither shuffled nor repeated: its step t is the same for every seed.

Grain prefetches batches in `iterate`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Generator
from typing import Any

import numpy as np

from jaxmoe.data.batch import Batch, DataError, validate_batch
from jaxmoe.data.batch_sizes import BatchSizes
from jaxmoe.data.order import order_digest, shuffle_place
from jaxmoe.data.repacking import Repacking
from jaxmoe.data.skipped import SkippedRows
from jaxmoe.data.source import Row, Source, Split
from jaxmoe.optional import require
from pallas_kernels.array_types import Float, Int
from sharding.distributed import gather

_PREFETCH = 2
"""Number of batches that a thread prefetches."""


@dataclasses.dataclass(frozen=True)
class Loader:
    """Batches of a source by step."""

    source: Source
    _: dataclasses.KW_ONLY
    batch_size: int
    """Rows of one step, over all hosts."""
    sequence_length: int
    """Predictions of one row, S."""
    seed: int
    """Seed of the order of rows in each epoch."""
    split: Split = "train"
    batch_sizes: BatchSizes | None = None
    """Rows of each step, if they grow to `batch_size`; None: the same at every step."""
    skipped: SkippedRows = SkippedRows()
    """Rows that are left out."""
    repacking: Repacking | None = None
    """What packs the documents of a step again; None leaves them in their rows."""

    def __post_init__(self):
        if self.batch_sizes is not None and self.batch_sizes.stages[-1][1] != self.batch_size:
            raise DataError(
                f"batch_sizes ends with {self.batch_sizes.stages[-1][1]} rows, and batch_size is "
                f"{self.batch_size}: they must be the same"
            )
        if self.sequence_length < 2:
            raise DataError(f"sequence_length={self.sequence_length} must be at least 2")
        if self.batch_size < 1:
            raise DataError(f"batch_size={self.batch_size} must be at least 1")
        if self.seed < 0:
            raise DataError(f"seed={self.seed} must not be negative")
        num_rows = self._num_rows()
        if num_rows is not None and num_rows < self.batch_size:
            more = "bring more data" if self.split == "train" else "hold out more"
            raise DataError(
                f"the {self.split} split has {num_rows} rows of sequence_length="
                f"{self.sequence_length}, and batch_size={self.batch_size} must be at most that: "
                f"lower one of them (--training.sequence_length, --training.batch_size), or {more}"
            )

    @property
    def num_batches(self) -> int | None:
        """Whole batches of one pass over the split; None if unlimited."""
        num_rows = self._num_rows()
        return None if num_rows is None else num_rows // self.batch_size

    def batch(self, step: int, *, process_index: int = 0, process_count: int = 1) -> Batch:
        """Return the rows of one host at one step.

        Args:
            step: Global step, from 0.
            process_index: Part of the batch; hosts with the same rows (because they share
                sequences) pass the same number.
            process_count: Number of equal parts.

        Returns:
            Rows [B / process_count, S], as numpy arrays; packed again there are more.

        Raises:
            DataError: The batch does not divide into parts, the step is negative or past the end of
                the validation split, a token is outside the vocabulary, or all loss weights of a
                whole batch are 0.
        """
        rows = self._sizes.rows(step)
        if rows % process_count:
            raise DataError(
                f"batch_size={rows} must be divisible by the number of hosts "
                f"({process_count}): choose a multiple of {process_count}"
            )
        if not 0 <= process_index < process_count:
            raise DataError(f"process_index={process_index} must be in [0, {process_count})")
        part = rows // process_count
        first = self.first_row(step) + process_index * part
        self._check_step(step)
        if self.repacking is None:
            batch = _batch_of([self.row(number) for number in range(first, first + part)])
        else:
            batch = self.repacking.batch(
                self.step_rows(step), process_index=process_index, process_count=process_count
            )
        validate_batch(batch, self.source.vocab_size)
        if process_count == 1 and not batch.loss_weights.any():  # a part of a batch may have none
            raise DataError(
                f"{self.split} batch {step} has {batch.loss_weights.size} predictions, and the "
                "loss weight of each is 0 (padding, or the first token of a document): there is "
                "nothing to learn from it. Pack the rows, or leave such rows out"
            )
        return batch

    def step_rows(self, step: int) -> list[Row]:
        """Return all rows of a step, of all hosts.

        Args:
            step: Global step, from 0.
        """
        first = self.first_row(step)
        return [self.row(number) for number in range(first, first + self._sizes.rows(step))]

    def first_row(self, step: int) -> int:
        """Return the number of the first row of a step.

        Args:
            step: Global step, from 0.
        """
        return self._sizes.rows_before(step) + self.skipped.rows_before(step)

    def without_steps(self, first: int, last: int) -> Loader:
        """Return a loader that skips, before step `first`, the rows of some steps of this loader.

        Args:
            first: First step whose rows are skipped.
            last: Last step whose rows are skipped.
        """
        end = self.first_row(last) + self._sizes.rows(last)
        return dataclasses.replace(
            self, skipped=self.skipped.with_window(first, end - self.first_row(first))
        )

    def row(self, number: int) -> Row:
        """Return the row at a place of the endless sequence of the split.

        Args:
            number: Place, from 0: `first_row` of the step plus the place in the batch.
        """
        num_rows = self._num_rows()
        epoch = 0
        if num_rows is not None and self.split == "train":
            epoch, number = shuffle_place(number, size=num_rows, seed=self.seed)
        return self.source.row(self.split, number, self.sequence_length, epoch=epoch)

    def iterate(
        self, start_step: int, stop_step: int, *, process_index: int = 0, process_count: int = 1
    ) -> Generator[Batch, None, None]:
        """Yield the batches of steps [start_step, stop_step), prefetched by Grain.

        An error in the prefetching thread is raised at the step of the batch. Closing the iterator
        drops prefetched batches; the thread ends after its current batch.

        Raises:
            MissingPackageError: Grain is not installed.
        """
        grain = require("grain")
        steps = _LoaderSteps(self, start_step, stop_step, process_index, process_count)
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH)
        batches = iter(grain.MapDataset.source(steps).to_iter_dataset(ahead))
        try:
            yield from batches
        finally:
            batches.close()

    def fingerprint(self) -> dict[str, Any]:
        """Return everything that determines the batches, as JSON values."""
        order = {} if self._num_rows() is None else {"order": order_digest()}
        stages = self.batch_sizes and [list(stage) for stage in self.batch_sizes.stages]
        return {
            **order,
            **({"batch_sizes": stages} if stages else {}),
            "source": self.source.fingerprint(),
            "split": self.split,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
        }

    def position(self, step: int) -> dict[str, Any]:
        """Return the data position for a checkpoint: the fingerprint, and the next step."""
        skipped = self.skipped.before(step).to_json()
        return {**self.fingerprint(), **({"skipped": skipped} if skipped else {}), "step": step}

    @property
    def _sizes(self) -> BatchSizes:
        return self.batch_sizes or BatchSizes(((0, self.batch_size),))

    def _num_rows(self) -> int | None:
        return self.source.num_rows(self.split, self.sequence_length)

    def _check_step(self, step: int) -> None:
        """Raise for a negative step, or a step past the end of the validation split."""
        if step < 0:
            raise DataError(f"step={step} must not be negative")
        num_rows = self._num_rows()
        if self.split == "validation" and num_rows is not None:
            if step >= num_rows // self.batch_size:
                raise DataError(
                    f"validation batch {step} does not exist: the split has {num_rows} rows of "
                    f"sequence_length={self.sequence_length}, {num_rows // self.batch_size} "
                    f"batches of {self.batch_size}. Ask for fewer batches or smaller ones"
                )


@dataclasses.dataclass(frozen=True)
class _LoaderSteps:
    """Batches of a range of steps as a random-access source of Grain."""

    loader: Loader
    start: int
    stop: int
    process_index: int
    process_count: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __getitem__(self, index: int) -> Batch:
        return self.loader.batch(
            self.start + index, process_index=self.process_index, process_count=self.process_count
        )


def _batch_of(rows: list[Row]) -> Batch:
    """Return the batch of rows, with segments and positions if any row is packed."""
    tokens = np.stack([row.tokens for row in rows])
    inputs, targets = (np.ascontiguousarray(part) for part in (tokens[:, :-1], tokens[:, 1:]))
    weights = np.stack([_target_weights(row) for row in rows])
    tasks = [row.task for row in rows if row.task is not None]
    extra: dict[str, Any] = {}
    if len(tasks) == len(rows):
        extra["task"] = np.repeat(np.array(tasks, np.int32)[:, None], inputs.shape[1], axis=1)
    if all(row.segment_ids is None for row in rows):
        return Batch(tokens=inputs, targets=targets, loss_weights=weights, extra=extra)
    segment = np.ones(tokens.shape[1], np.int32)
    segments = np.stack([segment if row.segment_ids is None else row.segment_ids for row in rows])
    is_same = segments[:, 1:] == segments[:, :-1]
    # A token's segment begins at the last place where the segment changed.
    places = np.arange(inputs.shape[1], dtype=np.int32)[None, :]
    is_first = np.concatenate([np.ones_like(is_same[:, :1]), ~is_same[:, :-1]], axis=1)
    begins = np.maximum.accumulate(np.where(is_first, places, 0), axis=1)
    return Batch(
        tokens=inputs,
        targets=targets,
        loss_weights=np.where(is_same & (segments[:, 1:] != 0), weights, np.float32(0)),
        segment_ids=np.ascontiguousarray(segments[:, :-1]),
        positions=places - begins,
        extra=extra,
    )


def _target_weights(row: Row) -> Float[np.ndarray, " S"]:
    """Return the loss weight of each prediction of a row."""
    if row.loss_weights is None:
        return np.ones(len(row.tokens) - 1, np.float32)
    return row.loss_weights[1:].astype(np.float32)


def evaluation_batches(
    source: Source,
    *,
    batch_size: int,
    sequence_length: int,
    num_batches: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Generator[Batch, None, None]:
    """Return the first `num_batches` validation batches, always the same in the same order.

    Args:
        source: Source of the rows.
        batch_size: Rows of a batch, over all hosts.
        sequence_length: Predictions of a row, S.
        num_batches: Number of batches.
        process_index: Part of each batch.
        process_count: Number of parts.

    Raises:
        DataError: The validation split has fewer batches; raised before the first one.
    """
    loader = Loader(
        source,
        batch_size=batch_size,
        sequence_length=sequence_length,
        seed=0,
        split="validation",
    )
    if num_batches < 1:
        raise DataError(f"num_batches={num_batches} must be at least 1")
    if loader.num_batches is not None and num_batches > loader.num_batches:
        raise DataError(
            f"num_batches={num_batches} of batch_size={batch_size} and sequence_length="
            f"{sequence_length} are more than the validation split holds "
            f"({loader.num_batches}): ask for at most {loader.num_batches} (--evaluation.batches; "
            "--batches of evaluate), or hold out more"
        )
    return loader.iterate(0, num_batches, process_index=process_index, process_count=process_count)


def check_position(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise if a run would resume with other data than it was trained on.

    Args:
        saved: `position` in the checkpoint.
        current: `position` of the loader that resumes.

    Raises:
        DataError: One line for each field that differs, with both values.
    """
    before = _flat(saved)
    now = _flat(current)
    values = {
        field: (before.get(field, "absent"), now.get(field, "absent")) for field in before | now
    }
    differing = [
        f"  {field}: {was} in the checkpoint, {is_now} now"
        for field, (was, is_now) in values.items()
        if was != is_now
    ]
    if differing:
        raise DataError(
            "the checkpoint was trained on other data:",
            *differing,
            "Give the same data, seed, batch size and length, or start a new run directory",
        )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted names."""
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def check_hosts(loader: Loader, *, process_index: int, process_count: int) -> None:
    """Raise unless the hosts together read the batches of one loader; each host must call this.

    A part that two hosts read and another that no host reads still make a batch of the right shape.
    Before compiling, the hosts therefore exchange their part, the number of parts, and a hash of
    the loader's fingerprint.

    Args:
        loader: Loader of this host.
        process_index: Part that this host reads.
        process_count: Number of parts.

    Raises:
        DataError: A part is read more often than another, or not at all, or the hosts read
            different data; raised on every host.
    """
    digest = hashlib.sha256(json.dumps(loader.fingerprint(), sort_keys=True).encode()).digest()
    claim = [process_index, process_count, *np.frombuffer(digest[:8], "<i4").tolist()]
    check_claims(gather(np.array(claim, np.int32)))


def check_claims(claims: Int[np.ndarray, "hosts 4"]) -> None:
    """Raise unless the claims of all hosts are consistent.

    Args:
        claims: Part, number of parts, and two words of the hash, for each host.

    Raises:
        DataError: The claims are not consistent.
    """
    parts = claims[:, 0]
    counts = claims[:, 1]
    if len(set(counts.tolist())) > 1:
        raise DataError(
            f"the hosts cut batches into different numbers of parts: {counts.tolist()} on hosts 0 "
            f"to {len(claims) - 1}. Give all the same process_count"
        )
    readers = np.bincount(parts, minlength=counts[0])
    if len(set(readers.tolist())) > 1:
        shared = int(np.argmax(readers))
        raise DataError(
            f"hosts {np.flatnonzero(parts == shared).tolist()} all read part {shared} of every "
            f"batch, and part {int(np.argmin(readers))} of {counts[0]} is read by "
            f"{readers.min()}: give each host its own process_index"
        )
    differing = np.flatnonzero((claims[:, 2:] != claims[0, 2:]).any(axis=1))
    if len(differing):
        raise DataError(
            f"host {differing[0]} reads other data than host 0 (their files, seed, batch size, "
            "length or tokenizer differ): copy the same files to all, or read them from one place"
        )
