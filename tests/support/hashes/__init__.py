# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hashes of what the library computes, for proofs that a refactoring changes no number.

`python -m tests.support.hashes` has the command. A row is one feature in its smallest form; its
parts are hashes of losses, gradients, states, tokens, files or collectives. Hashes depend on the
processor and on the version of JAX: compare files of one machine.

    rows/          the table, a file for each area; builders import the library inside functions
    digests.py     hashes of arrays, trees, states and programs
    environment.py what every process sets before JAX starts
    workers.py     processes that compute rows
    files.py       the file of hashes, and the comparison of two

To add a row: a builder in `tests/support/hashes/rows/`, which `table` in
`tests/support/hashes/rows/__init__.py` collects. Members of a registry have rows without an edit.
"""
