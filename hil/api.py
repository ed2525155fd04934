"""Library functions to :func:`connect` to a board and :func:`run` a model on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice, fill_target, refuse_missing_device, use_device
from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.models.torch_module import export_program, is_torch, save_program
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.option_names import format_keyword, rename_in_error, rename_options
from hil.controller.pipeline.settings.options import PATH, SECONDS, TEXT, TEXTS, Options, check_value, make_options
from hil.controller.pipeline.stages import check_options
from hil.controller.pipeline.verdicts.accepting import check_accepted_outputs
from hil.controller.storage.run_context import RunContext, open_context
from hil.core.results import Stage
from hil.core.scratch import make_temporary_folder
from hil.errors import BoardError, HilError, ImportFailed, UsageError


def connect(
    board: str | Path = "",
    *,
    hw_type: str = "",
    runtime: str = "",
    faults: Sequence[str] = (),
    wait_s: float = 60.0,
) -> Board:
    """Connect to a board and lock it. Use as a context manager that releases the board.

    Args:
        board: board name, config file, or address: ``USER@HOST[:PORT]``, ``unix:PATH``, ``HOST:PORT``, or
            ``farm:SELECTOR`` for a board from the lab farm. "" uses ``HIL_BOARD``, or else the simulator.
        hw_type: hardware type: selects the board config for an address, or the simulator if ``board`` is "".
        runtime: runtime to install if the board needs an agent; "" uses the config's runtime.
        faults: simulator faults to inject, such as ``crash``.
        wait_s: timeout in seconds while the board is in use.

    Raises:
        UsageError: the board is unknown, or an argument is invalid.
        BoardUnreachable, BoardRefused, BoardBusy: the board does not respond, rejects the connection, or is
            still in use after the timeout.
    """
    where = check_value("board", board, ("a board's name, address or config file", PATH[1]))
    choice = choose(board if isinstance(board, str) else str(where), check_value("hw_type", hw_type, TEXT))
    pool = BoardPool("hil.connect", wait_s=check_value("wait_s", wait_s, SECONDS), needs_device=False)
    connected = pool.session(
        choice,
        runtimes=(check_value("runtime", runtime, TEXT),),
        faults=check_value("faults", faults, TEXTS, "for example ['crash']"),
    ).board
    try:
        connected.take()
    except BaseException:
        connected.close()
        raise
    return connected


def run(
    model: Any,
    board: Board,
    inputs: Mapping[str, Any] | Sequence[Any] = (),
    *,
    context: RunContext | None = None,
    **options: Any,
) -> Case:
    """Compile a model, run it on a board and compare its outputs with a reference.

    Args:
        model: path of a model file, a ``torch.nn.Module`` or a ``torch.export.ExportedProgram``.
        board: result of :func:`connect`.
        inputs: name -> tensor, or texts as in ``hil run --input``; missing inputs are seeded random. For a
            module, all arguments of its ``forward``: positional as a sequence, or by keyword as a mapping.
        context: cache and isolated processes to share between runs; None creates new ones. (Formerly ``shop``.)
        options: fields of :class:`hil.controller.pipeline.stages.Options`.

    Returns:
        The case, which is true if it passed. It has ``outcome``, ``reason``, ``result``, ``references``,
        ``verdicts``, ``timings`` and, if a stage failed, ``error``.

    Raises:
        UsageError: an option, file or argument is invalid, or the inputs do not match the model.
    """
    try:
        case = _run(model, board, inputs, context, options)
    except HilError as error:
        rename_in_error(error, format_keyword)
        raise
    if case.error is not None:
        rename_in_error(case.error, format_keyword)
    return replace(case, reason=rename_options(case.reason, format_keyword))


def _run(model: Any, board: Board, inputs: Any, context: RunContext | None, options: dict[str, Any]) -> Case:
    from hil.controller.storage.cache import Cache

    program = refused = None
    if is_torch(model):
        path = Path(f"{type(model).__name__}.pt2")
        try:
            program, inputs = export_program(model, inputs)
        except ImportFailed as error:
            refused, inputs = error, ()
    else:
        path = check_value("model", model, ("the path of a model's file", PATH[1]))
    chosen = make_options({"inputs": inputs, **options})
    if not all(hasattr(board, name) for name in ("config", "push", "load")):
        raise UsageError(
            f"board must be the result of hil.connect, got {board!r:.80}",
            hint="with hil.connect('sim') as board: hil.run(model, board)",
        )
    if board.closed:
        raise UsageError(f"board {board.name} was released", hint="reconnect with hil.connect")
    if not isinstance(context, RunContext | None):
        raise UsageError(f"context must be the result of hil.open_context or None, got {context!r:.80}")
    check_options(chosen, BoardChoice(board.config, board.name))
    if refused is not None:
        return Case(path.stem, path, chosen, Path()).with_error(refused, Stage.IMPORT)
    with contextlib.ExitStack() as stack:
        if context is None:
            context = stack.enter_context(open_context())
        elif chosen.recompute or chosen.debug_ir is not None:
            # A Cache object that recomputes does so only for the first request of an entry. A new object makes every
            # call recompute.
            context = replace(context, cache=Cache(context.cache.root))
        folder = Path(stack.enter_context(make_temporary_folder("hil-")))
        (folder / "logs").mkdir()
        if program is not None:
            path = folder / path
            save_program(program, path)
        runner = Runner(context, lasting=False)
        case = runner.begin(path, chosen, folder)
        check_accepted_outputs([(chosen.accept, case.model)])
        if case.outcome:
            return case
        try:
            stack.enter_context(_use_device(board, case.options))
        except BoardError as error:
            return case.with_error(error, Stage.LOAD)
        return runner.run_on_board(case, BoardSession(board))


@contextlib.contextmanager
def _use_device(board: Board, options: Options) -> Iterator[None]:
    """Use the device of the options on a connected board, with a target for this device."""
    before, runtime = board.config, options.runtime
    config = use_device(BoardChoice(before, board.name), runtime, options.device).config
    refuse_missing_device(config, runtime, board.info, board.name)
    board.config, _ = fill_target(config, runtime, board.info)
    try:
        yield
    finally:
        board.config = before
