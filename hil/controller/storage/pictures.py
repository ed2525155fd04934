"""Pictures with matplotlib, where it is installed: PNG, SVG or PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hil.errors import StorageError, UsageError

_HINT = "end the file's name in .png, .svg or .pdf"


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before hours are spent on what it shows.

    Raises:
        UsageError: matplotlib is not installed, draws no such file, or there is no such folder.
    """
    _, canvas_class = _matplotlib()
    if path.suffix.lstrip(".").lower() not in canvas_class.get_supported_filetypes():
        raise UsageError(f"cannot draw {path}", hint=_HINT)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot draw {path}: there is no folder {path.parent}")


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, of that many inches. Raises UsageError: matplotlib is not installed."""
    figure_class, canvas_class = _matplotlib()
    figure = figure_class(figsize=(width, height), layout="constrained")
    canvas_class(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure, as what the path's suffix says. Raises UsageError, StorageError: it cannot be written."""
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise UsageError(f"cannot draw {path}: {error}", hint=_HINT) from error
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("matplotlib is needed to draw a picture", hint="pip install 'hil[plot]'") from error
    return Figure, FigureCanvasAgg
