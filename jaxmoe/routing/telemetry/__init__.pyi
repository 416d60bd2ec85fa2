# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.routing.telemetry.summary import LoadWindow as LoadWindow
from jaxmoe.routing.telemetry.summary import dropped_fraction as dropped_fraction
from jaxmoe.routing.telemetry.summary import load as load
from jaxmoe.routing.telemetry.summary import max_violation as max_violation
from jaxmoe.routing.telemetry.summary import summarise as summarise
from jaxmoe.routing.telemetry.summary import watch_state as watch_state
