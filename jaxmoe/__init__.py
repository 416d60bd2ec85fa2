# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A JAX library for Mixture-of-Experts language models.

    params = init_params(ModelConfig(), jax.random.key(0))
    output = Transformer(ModelConfig()).apply({"params": params}, tokens)

Importing it initialises no backend and sets no flag.
"""

from pallas_kernels.public_names import load_when_used, name_packages_beside

name_packages_beside(__name__)
load_when_used(__name__)

__version__ = "0.2.0"
