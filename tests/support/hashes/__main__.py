# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Proves that a refactoring changes no number: hashes before, hashes after, compared.

    python -m tests.support.hashes take FILE [--rows PATTERN ...] [--workers 2]
    python -m tests.support.hashes compare OLD NEW
    python -m tests.support.hashes list

`take` computes the rows of tests/support/hashes/rows and writes their hashes; a row that fails is
named at the end, and the exit code is 1. `compare` names every row and part that differs, and every
row that only one file has; the exit code is 1 if there is one. A PATTERN is that of a shell, such
as 'router/*'. What rows print is in .cache/hashes/logs/FILE.
"""

from __future__ import annotations

import argparse
import fnmatch
import pathlib
import sys
import time

from tests.support.hashes import environment, files


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.hashes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    take = commands.add_parser("take", help="compute rows and write their hashes")
    take.add_argument("file", type=pathlib.Path)
    take.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN")
    take.add_argument("--workers", type=int, default=2, help="number of processes")
    take.add_argument("--cache", type=pathlib.Path, default=environment.CACHE)
    take.add_argument("--reverse", action="store_true", help="begin with the last row")
    compare = commands.add_parser("compare", help="name what differs between two files")
    compare.add_argument("old", type=pathlib.Path)
    compare.add_argument("new", type=pathlib.Path)
    commands.add_parser("list", help="print the names of all rows")
    options = parser.parse_args(arguments)
    if options.command == "compare":
        return _compare(options.old, options.new)
    environment.prepare(getattr(options, "cache", environment.CACHE).resolve())
    from tests.support.hashes.rows import table

    if options.command == "list":
        print("\n".join(table()))
        return 0
    names = [name for name in table() if any(fnmatch.fnmatch(name, rows) for rows in options.rows)]
    if not names:
        print(f"--rows {' '.join(options.rows)}: no row has such a name: see `list`")
        return 2
    return _take(options.file, names[::-1] if options.reverse else names, options.workers)


def _take(path: pathlib.Path, names: list[str], workers: int) -> int:
    from tests.support.hashes import workers as processes

    start = time.monotonic()

    def report(name: str, parts: files.Parts, seconds: float) -> None:
        failure = f"  FAILED {parts[files.ERROR]}" if files.ERROR in parts else ""
        print(f"{name}  {seconds:.1f}{failure}", flush=True)

    logs = environment.ROOT / ".cache" / "hashes" / "logs" / path.stem
    rows = processes.compute_all(names, workers=workers, logs=logs, report=report)
    files.write(path, environment.describe(), rows)
    failures = files.errors(rows)
    print(f"{len(rows)} rows in {time.monotonic() - start:.0f} s, {len(failures)} failed: {path}")
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures else 0


def _compare(old: pathlib.Path, new: pathlib.Path) -> int:
    (old_environment, old_rows), (new_environment, new_rows) = files.read(old), files.read(new)
    for line in files.environment_differences(old_environment, new_environment):
        print(f"environment: {line}")
    lines = files.differences(old_rows, new_rows)
    equal = len(old_rows.keys() | new_rows.keys()) - len(lines)
    print("\n".join([*lines, f"{len(lines)} rows differ, {equal} are equal"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
