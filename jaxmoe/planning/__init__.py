# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts memory, traffic and time of a train step before it runs."""
