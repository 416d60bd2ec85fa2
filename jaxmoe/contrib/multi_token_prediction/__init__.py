# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Modules that predict tokens further ahead: trained beside a model, and used to draft for it."""
