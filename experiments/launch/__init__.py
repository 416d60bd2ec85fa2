# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe launch`: starts a command on the hosts of a cluster."""
