# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Several instances of a model behind one engine, and meshes that change while they serve."""
