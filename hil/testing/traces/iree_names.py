"""Names from IREE's TensorFlow tests for compiled modules. The caller closes the modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.testing.traces.compiled import CompiledModule
from hil.testing.traces.compiled import compile as compile_for

# Backends that IREE removed -> their replacements.
_REPLACED = {"iree_vmla": "iree_vmvx", "iree_llvmjit": "iree_llvmcpu", "iree_llvmaot": "iree_llvmcpu"}


@dataclass(frozen=True)
class BackendInfo:
    """Backend of a module, by name: ``iree_llvmcpu``, ``tf``, ``board:NAME``, ... (see :func:`hil.traces.compile`)."""

    backend_name: str

    def compile(
        self, module: Any, exported_names: Sequence[str] = (), artifacts_dir: str | Path | None = None
    ) -> CompiledModule:
        """Return a module whose methods run on this backend.

        Args:
            module: as in :func:`hil.traces.compile`, which also raises the errors.
            exported_names: methods to export; empty is every public tf.function.
            artifacts_dir: as in :func:`hil.traces.compile`.
        """
        backend = _REPLACED.get(self.backend_name, self.backend_name)
        return compile_for(module, backend, exported_names=exported_names or None, artifacts_dir=artifacts_dir)


def IreeCompiledModule(  # noqa: N802 (IREE's name)
    module_class: Any,
    backend_info: BackendInfo,
    exported_names: Sequence[str] = (),
    artifacts_dir: str | Path | None = None,
) -> CompiledModule:
    """Return a module whose methods run on a backend, as :meth:`BackendInfo.compile` does."""
    return backend_info.compile(module_class, exported_names, artifacts_dir)
