"""Stable names for plugins: types to extend hil with, and errors to raise (docs/extending.md).

A runtime plugin is different: it runs on the board, which has no controller. It imports
:class:`hil.agent.runtimes.Runtime` from its module instead.
"""

from __future__ import annotations

from hil.controller.backends.compilers import Compiler
from hil.controller.backends.references import Reference
from hil.controller.devices.links.link import BoardLoan, BoardProvider, Link
from hil.controller.models.executorch_backends import ExecuTorchBackend
from hil.controller.models.flows import Flow, Recipe
from hil.controller.models.importers import Importer
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.controller.workloads.bundles.formats import Format
from hil.core.board_config import BoardConfig
from hil.core.results import Artifact, Model
from hil.errors import CompileFailed, ImportFailed, ReferenceFailed, UsageError

__all__ = [
    "Artifact",
    "BoardConfig",
    "BoardLoan",
    "BoardProvider",
    "Cache",
    "CompileFailed",
    "Compiler",
    "ExecuTorchBackend",
    "Flow",
    "Format",
    "ImportFailed",
    "Importer",
    "Isolated",
    "Link",
    "Model",
    "Recipe",
    "Reference",
    "ReferenceFailed",
    "UsageError",
    "load_tensors",
    "save_tensors",
]
