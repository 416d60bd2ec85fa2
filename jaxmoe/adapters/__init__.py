# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters: what is trained of a model whose other parameters stay as they are.

    model = dataclasses.replace(model, adapter=LoraConfig(rank=16))
    params = init_params(model, key)         # with the factors of the adapter
    params = with_base(params, base)         # values of the model that is adapted

A config has `table(base)`: the parameter table of the adapted model, with the rows of its own and
the groups of those that are not trained. Initialisation, optimisers, sharding and checkpoints read
the table.

To add an adapter: a file in jaxmoe/contrib/adapters with its config, a row under `adapter` in
jaxmoe/catalog/layers.py, a row of ADAPTERS in tests/jaxmoe/adapters/test_adapters.py.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

ADAPTERS = Registry("adapter")
