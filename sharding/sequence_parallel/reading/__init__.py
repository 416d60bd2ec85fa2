# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a cache that a generated token reads: all of it, or pages chosen for it."""
