# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Members of the socket `Gradients`: how a step gets its gradient.

To add an estimator: a config that extends `Gradients` in a file of its own, and its row under
`gradients` in `jaxmoe/catalog/runs.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

ESTIMATORS = Registry("gradients")
