# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Laboratory of serving: simulator, caches of items, load test, measured costs."""
