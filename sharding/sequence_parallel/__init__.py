# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism: attention over sequences whose positions are sharded, and caches.

To add a form: a file in sharding/sequence_parallel/ with a subclass of `SequenceForm`
(sharding/sequence_parallel/form.py), its row under `sequence_parallel` in
jaxmoe/catalog/executions.py, a row in REGISTRIES of tests/test_architecture.py, a row in
FORMS of tests/sharding/sequence_parallel/test_sequence_parallel.py.
"""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
