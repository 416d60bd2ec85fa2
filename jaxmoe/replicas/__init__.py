# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Methods of training with workers that communicate rarely or briefly.

To add a method: a file in jaxmoe/replicas/methods/ with a config class, as
jaxmoe/replicas/methods/diloco.py, its row under `replicas` in jaxmoe/catalog/runs.py, a
row in REGISTRIES of tests/test_architecture.py, a row in METHODS of
tests/jaxmoe/replicas/test_methods.py, or of GRADIENT_METHODS in
tests/jaxmoe/replicas/test_gradient_methods.py.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

REPLICAS = Registry("replicas")
