"""Draw pictures with matplotlib, if installed: PNG, SVG or PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hil.controller.storage.tool_caches import set_matplotlib_directory
from hil.core.install_hints import make_install_command
from hil.errors import StorageError, UsageError

_HINT = "use the extension .png, .svg or .pdf"


def check_picture(path: Path) -> None:
    """Validate the path of a picture before starting long work.

    Raises:
        UsageError: matplotlib is not installed, the format is unsupported, or the directory does not exist.
    """
    _, canvas_class = _import_matplotlib()
    if path.suffix.lstrip(".").lower() not in canvas_class.get_supported_filetypes():
        raise UsageError(f"cannot draw {path}", hint=_HINT)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: directory {path.parent} not found")


def make_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure with a size in inches. Raises UsageError if matplotlib is not installed."""
    figure_class, canvas_class = _import_matplotlib()
    figure = figure_class(figsize=(width, height), layout="constrained")
    canvas_class(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure in the format of the path's suffix.

    Raises:
        UsageError: unsupported format.
        StorageError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise UsageError(f"cannot draw {path}: {error}", hint=_HINT) from error
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def _import_matplotlib() -> tuple[Any, Any]:
    try:
        with set_matplotlib_directory():
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plots require matplotlib", hint=make_install_command("plot")) from error
    return Figure, FigureCanvasAgg
