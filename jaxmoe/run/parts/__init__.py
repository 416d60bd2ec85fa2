# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What capabilities do in a run that most runs do without."""
