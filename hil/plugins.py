"""Stable names for packages: types to extend hil with, errors to raise, and helpers (docs/extending.md).

A runtime is different: it runs on the board, which has no controller. It imports :mod:`hil.agent.plugins` instead.
"""

from __future__ import annotations

from hil.controller.backends.compilers import Compiler
from hil.controller.backends.references import Reference
from hil.controller.backends.targets import Target
from hil.controller.devices.board_client import AgentEndpoint, BoardClient
from hil.controller.devices.links.link import BoardLoan, BoardProvider, Link
from hil.controller.devices.metering.samples import Meter, PowerSamples
from hil.controller.models.compiling import CompileOrder
from hil.controller.models.executorch_backends import ExecuTorchBackend
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.recipe import Recipe
from hil.controller.models.importers import Importer
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.controller.workloads.bundles.formats import Format
from hil.core.board_config import BoardConfig
from hil.core.digest import digest_of
from hil.core.files import digest_file
from hil.core.results import Artifact, Model
from hil.core.tensors import TensorSpec
from hil.errors import (
    BoardLost,
    BoardUnreachable,
    CompileCrashed,
    CompileFailed,
    HilError,
    ImportFailed,
    NotRun,
    ReferenceFailed,
    StageTimeout,
    UsageError,
)

__all__ = [
    "AgentEndpoint",
    "Artifact",
    "BoardClient",
    "BoardConfig",
    "BoardLoan",
    "BoardLost",
    "BoardProvider",
    "BoardUnreachable",
    "Cache",
    "CompileCrashed",
    "CompileFailed",
    "CompileOrder",
    "Compiler",
    "ExecuTorchBackend",
    "Flow",
    "Format",
    "HilError",
    "ImportFailed",
    "Importer",
    "Isolated",
    "Link",
    "Meter",
    "Model",
    "NotRun",
    "PowerSamples",
    "Recipe",
    "Reference",
    "ReferenceFailed",
    "StageTimeout",
    "Target",
    "TensorSpec",
    "UsageError",
    "digest_file",
    "digest_of",
    "load_tensors",
    "save_tensors",
]
