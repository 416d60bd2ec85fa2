# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Assignment: in training the choice follows an even assignment of many tokens at once."""
