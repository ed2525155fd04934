"""The library's two verbs: :func:`connect` to a board, :func:`run` a model on it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.choice import BoardChoice, choose
from hil.controller.opening import AnyBoard, open_board
from hil.controller.pipeline import (
    Case,
    Options,
    Workshop,
    begin,
    check_options,
    conclude,
    execute,
    prepare,
    refer_case,
)
from hil.tensors import Array


def connect(board: str = "sim", *, hw_type: str = "", faults: Sequence[str] = (), wait_s: float = 60.0) -> AnyBoard:
    """Connect to a board and take it: a context manager that gives it back.

    Args:
        board: a board's name, a config file, ``unix:PATH`` or ``HOST:PORT``.
        hw_type: for an address: the board config to use.
        faults: for a simulator: faults to switch on, such as ``crash``.
        wait_s: how long to wait while somebody else has it.

    Raises:
        UsageError: there is no such board.
        BoardUnreachable, BoardBusy: it does not answer, or is not free in time.
    """
    connected = open_board(choose(board, hw_type), purpose="hil.connect", faults=tuple(faults), wait_s=wait_s)
    connected.take()
    return connected


def run(
    model: str | Path,
    board: AnyBoard,
    inputs: Mapping[str, Array] | Sequence[str] = (),
    *,
    shop: Workshop | None = None,
    **options: Any,
) -> Case:
    """Compile a model, run it on a board and compare it with its reference.

    Args:
        model: an ONNX, MLIR or .vmfb file.
        board: from :func:`connect`.
        inputs: name -> tensor, or texts as ``hil run --input`` takes; the rest is seeded random.
        shop: a cache and isolated processes to share between runs; a new one where None.
        options: fields of :class:`hil.controller.pipeline.Options`.

    Returns:
        The case: true when it passed, with ``outcome``, ``reason``, ``result``, ``references``, ``verdicts``,
        ``timings`` and, where a stage failed, ``error``.

    Raises:
        UsageError: an option is wrong, or the model does not take these inputs.
    """
    from hil.controller.cache import Cache
    from hil.controller.isolated import Isolated

    chosen = Options(inputs=inputs, **options)
    choice = BoardChoice(board.config, board.name)
    check_options(chosen, choice)
    own = None
    if shop is None:
        own = Isolated()
        shop = Workshop(Cache(), own)
    try:
        with tempfile.TemporaryDirectory(prefix="hil-") as folder:
            (Path(folder) / "logs").mkdir()
            case = prepare(begin(Path(model), chosen, Path(folder), shop), board.config, shop)
            return conclude(refer_case(execute(case, board, shop), shop), shop)
    finally:
        if own is not None:
            own.close()
