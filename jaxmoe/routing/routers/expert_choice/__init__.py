# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Expert choice: experts take tokens, or mixtures of tokens. Not causal."""
