# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Other ways of rows and tokens to the experts: lent experts, and moves to predicted devices."""
