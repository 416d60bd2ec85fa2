# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Searches meshes, layouts, dispatchers, schedules, remat and micro-batches for a fast plan.

meshes       replica x stage x data x expert x seq x tensor = devices
space        the choices beside the mesh
best_first   the search itself
bounds       what a plan takes at least
verdicts     why a plan was not chosen
memory_policy  what waits in host memory
remedies     changes that save memory, if nothing fits
"""

from jaxmoe.planning.search.best_first import Candidate as Candidate
from jaxmoe.planning.search.best_first import Factors as Factors
from jaxmoe.planning.search.best_first import SearchResult as SearchResult
from jaxmoe.planning.search.best_first import search as search
from jaxmoe.planning.search.meshes import enumerate_meshes as enumerate_meshes
from jaxmoe.planning.search.meshes import mesh_flags as mesh_flags
from jaxmoe.planning.search.meshes import mesh_in_words as mesh_in_words
from jaxmoe.planning.search.meshes import on_mesh as on_mesh
from jaxmoe.planning.search.meshes import stages_of as stages_of
from jaxmoe.planning.search.remedies import remedies as remedies
from jaxmoe.planning.search.space import EVERYTHING as EVERYTHING
from jaxmoe.planning.search.space import Space as Space
