# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Store of samples between the tasks that make them and the training that takes them (AsyncFlow).

A sample is a row. Its columns (question, answers, rewards) are filled by tasks, in any order that
what they read allows. A task asks for rows that have what it reads and lack what it writes:

    store.submit(version, question=...)             a new row, of a version of the parameters
    store.claim(["question"], ["answers"], 8)       rows for a task, each for one worker only
    store.fill(row.id, answers=...)                 columns of a claimed row
    store.take(["answers", "rewards"], 8)           the oldest rows, which leave the store
    store.advance(version)                          the training has made a new version

A row may be taken while its version is at most `staleness` behind that of the store; an older one
is dropped and counted. With staleness 0 a row trains the parameters that it was made with, which is
the synchronous loop. Submitted rows are taken, dropped or waiting, none twice:

    submitted = taken + dropped + waiting

All methods may be called from any thread. Source: AsyncFlow (arXiv 2507.01663): its
transfer queue, kept in one process.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from jaxmoe.errors import JaxmoeError

Found = TypeVar("Found")


class StoreClosedError(JaxmoeError, RuntimeError):
    """The store was closed; its waiting tasks end with this."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """A sample as a task gets it."""

    id: int
    """Number in the order of submission, from 0."""
    version: int
    """Version of the parameters that it is made with."""
    values: dict[str, Any]
    """Columns that the task reads."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamCounts:
    """Rows by what became of them."""

    submitted: int = 0
    taken: int = 0
    dropped: int = 0
    """Rows that were too old before they were taken."""
    waiting: int = 0


@dataclasses.dataclass(kw_only=True, slots=True)
class _HeldRow:
    """A row in the store."""

    version: int
    values: dict[str, Any]
    claimed: set[str]
    """Columns that a task has promised to fill."""


class SampleStore:
    """Rows with columns, for several threads.

    Args:
        columns: Names of the columns.
        staleness: Versions that a row may be behind when it is taken.
        version: Version of the parameters at the start.

    Raises:
        ValueError: Staleness is negative, or there is no column.
    """

    def __init__(self, columns: Iterable[str], *, staleness: int = 0, version: int = 0):
        self._columns = frozenset(columns)
        if staleness < 0 or not self._columns:
            raise ValueError(
                f"a store needs a column and staleness of at least 0, and has staleness="
                f"{staleness} and {len(self._columns)} columns"
            )
        self._staleness = staleness
        self._version = version
        self._rows: dict[int, _HeldRow] = {}
        self._submitted = self._taken = self._dropped = 0
        self._closed: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def version(self) -> int:
        """Version of the parameters that rows are compared with."""
        with self._changed:
            return self._version

    def counts(self) -> StreamCounts:
        """Return the numbers of rows, all of the same moment."""
        with self._changed:
            return StreamCounts(
                submitted=self._submitted,
                taken=self._taken,
                dropped=self._dropped,
                waiting=len(self._rows),
            )

    def submit(self, version: int, **values: Any) -> int:
        """Add a row and return its number; one that is too old is counted as dropped.

        Args:
            version: Version of the parameters that it is made with, not above that of the store.
            **values: Columns that it begins with.

        Raises:
            ValueError: The version is in the future, or there is no such column.
            StoreClosedError: The store is closed.
        """
        self._check(values)
        with self._changed:
            self._raise_if_closed()
            if version > self._version:
                raise ValueError(
                    f"a row of version {version} was submitted to a store at version"
                    f" {self._version}: call advance first"
                )
            number = self._submitted
            self._submitted = self._submitted + 1
            if self._is_old(version):
                self._dropped += 1
            else:
                self._rows[number] = _HeldRow(version=version, values=dict(values), claimed=set())
                self._changed.notify_all()
            return number

    def claim(
        self,
        reads: Sequence[str],
        writes: Sequence[str],
        number: int,
        *,
        timeout: float | None = None,
    ) -> list[SampleRow]:
        """Return rows for a task, oldest first; they wait in the store for `fill`.

        Args:
            reads: Columns that the rows have.
            writes: Columns that the rows lack, and that no other task fills.
            number: Rows to return; waits for so many.
            timeout: Seconds to wait at most; None for no limit.

        Raises:
            StoreClosedError: The store is closed.
            TimeoutError: There were too few rows.
        """
        self._check((*reads, *writes))

        def is_free(row: _HeldRow) -> bool:
            return not any(column in row.values or column in row.claimed for column in writes)

        def claim_one() -> list[SampleRow] | None:
            free = [id_ for id_, row in self._rows.items() if _has(row, reads) and is_free(row)]
            if len(free) < number:
                return None
            for id_ in free[:number]:
                self._rows[id_].claimed.update(writes)
            return [self._row(id_, reads) for id_ in free[:number]]

        return self._wait(claim_one, timeout)

    def fill(self, number: int, **values: Any) -> bool:
        """Write columns of a claimed row.

        Args:
            number: Number of the row.
            **values: Columns that were claimed.

        Returns:
            Whether the row is still there; it may have become too old.

        Raises:
            ValueError: The columns of the row are not claimed.
        """
        self._check(values)
        with self._changed:
            if number not in self._rows:
                return False
            row = self._rows[number]
            if unclaimed := values.keys() - row.claimed:
                raise ValueError(f"row {number}: claim {', '.join(sorted(unclaimed))} first")
            row.claimed -= values.keys()
            row.values.update(values)
            self._changed.notify_all()
            return True

    def take(
        self, reads: Sequence[str], number: int, *, timeout: float | None = None
    ) -> list[SampleRow]:
        """Return the oldest rows, and remove them from the store.

        A row that is complete waits for older ones, so that what is taken does not depend on time.

        Args:
            reads: Columns that the rows must have, with none being filled.
            number: Rows to return; waits for so many.
            timeout: Seconds to wait at most; None for no limit.

        Raises:
            StoreClosedError: The store is closed.
            TimeoutError: There were too few rows.
        """
        self._check(reads)

        def taken() -> list[SampleRow] | None:
            ids = list(itertools.islice(self._rows, number))
            rows = [self._rows[id_] for id_ in ids]
            if len(ids) < number or not all(_has(row, reads) and not row.claimed for row in rows):
                return None
            samples = [self._row(id_, reads) for id_ in ids]
            for id_ in ids:
                del self._rows[id_]
            self._taken += len(ids)
            return samples

        return self._wait(taken, timeout)

    def advance(self, version: int) -> None:
        """Go on to a later version, and drop the rows that are too old for it.

        Args:
            version: Version of the parameters, not below the current one.

        Raises:
            ValueError: It is below.
        """
        with self._changed:
            if version < self._version:
                raise ValueError(f"version {version} is before the current {self._version}")
            self._version = version
            old = [id_ for id_, row in self._rows.items() if self._is_old(row.version)]
            for id_ in old:
                del self._rows[id_]
            self._dropped += len(old)
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """End all waiting calls, and refuse new ones; no-op for a closed store.

        Args:
            error: What they raise, the error of a task that cannot go on; `StoreClosedError` when
                None.
        """
        with self._changed:
            if self._closed is None:
                self._closed = error or StoreClosedError("the store of samples is closed")
            self._changed.notify_all()

    def _wait(self, attempt: Callable[[], Found | None], timeout: float | None) -> Found:
        """Return the first result that is not None; called again after each change."""
        results: list[Found] = []

        def is_over() -> bool:
            if self._closed is None and (result := attempt()) is not None:
                results.append(result)
            return self._closed is not None or bool(results)

        with self._changed:
            if not self._changed.wait_for(is_over, timeout):
                raise TimeoutError(f"the store had too few rows for {timeout} s")
            if not results:
                self._raise_if_closed()
            return results[0]

    def _row(self, number: int, reads: Sequence[str]) -> SampleRow:
        row = self._rows[number]
        values = {column: row.values[column] for column in reads}
        return SampleRow(id=number, version=row.version, values=values)

    def _is_old(self, version: int) -> bool:
        return self._version - version > self._staleness

    def _raise_if_closed(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _check(self, columns: Iterable[str]) -> None:
        if unknown := set(columns) - self._columns:
            raise ValueError(
                f"no column {', '.join(sorted(unknown))}: there are"
                f" {', '.join(sorted(self._columns))}"
            )


def _has(row: _HeldRow, columns: Sequence[str]) -> bool:
    return all(column in row.values for column in columns)
