# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes and reads what a run reports: header, samples, pictures, summary, pages."""
