# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP endpoint over an engine, in the form of OpenAI's API (extra `serve`)."""
