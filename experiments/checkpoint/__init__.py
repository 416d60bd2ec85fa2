# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe checkpoint`: verify, inspect, convert and reshard checkpoints."""
