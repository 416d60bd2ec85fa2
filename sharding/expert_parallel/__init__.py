# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: dispatchers that bring rows to their experts, and `expert_parallel`.

To add a dispatcher: a file in sharding/expert_parallel/ with a subclass of `Dispatcher`
(sharding/expert_parallel/dispatcher.py), its row under `dispatcher` in
jaxmoe/catalog/executions.py, a row in REGISTRIES of tests/test_architecture.py, a row in
CONFIGS of tests/sharding/expert_parallel/test_expert_parallel.py.
"""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
