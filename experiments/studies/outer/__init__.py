# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Methods of low-communication training, at equal tokens."""
