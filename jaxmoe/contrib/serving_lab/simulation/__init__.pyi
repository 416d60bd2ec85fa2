# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.contrib.serving_lab.simulation.cost import Roofline as Roofline
from jaxmoe.contrib.serving_lab.simulation.measures import Measures as Measures
from jaxmoe.contrib.serving_lab.simulation.measures import measure as measure
from jaxmoe.contrib.serving_lab.simulation.run import Simulation as Simulation
from jaxmoe.contrib.serving_lab.simulation.sizes import ModelSizes as ModelSizes
from jaxmoe.contrib.serving_lab.simulation.workload import WORKLOADS as WORKLOADS
from jaxmoe.contrib.serving_lab.simulation.workload import Arrival as Arrival
from jaxmoe.contrib.serving_lab.simulation.workload import Workload as Workload
