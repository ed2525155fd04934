"""The library's two verbs: :func:`connect` to a board, :func:`run` a model on it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_resolver import choose
from hil.controller.models.torch_module import exported, is_torch, save_program
from hil.controller.pipeline.accepting import check_accepted_outputs
from hil.controller.pipeline.board_pool import BoardPool, BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.option_names import as_keyword, rename_in_error, rename_options
from hil.controller.pipeline.options import PATH, SECONDS, TEXT, TEXTS, checked, options_of
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.stages import check_options
from hil.controller.storage.run_context import RunContext
from hil.core.results import Stage
from hil.core.scratch import temporary_folder
from hil.errors import HilError, ImportFailed, UsageError


def connect(
    board: str | Path = "",
    *,
    hw_type: str = "",
    runtime: str = "",
    faults: Sequence[str] = (),
    wait_s: float = 60.0,
) -> Board:
    """Connect to a board and take it: a context manager that gives it back.

    Args:
        board: a board's name, a config file, or an address: ``USER@HOST[:PORT]``, ``unix:PATH``, ``HOST:PORT``, or
            ``farm:SELECTOR`` for one that the lab farm lends; "" is what ``HIL_BOARD`` names, else the simulator.
        hw_type: for an address: the board config to use; without a board: the kind of simulator.
        runtime: the one that is going to be used, where an agent has to be put on the board; "" is the config's.
        faults: for a simulator: faults to switch on, such as ``crash``.
        wait_s: how long to wait while somebody else has it.

    Raises:
        UsageError: there is no such board, or an argument is of the wrong kind.
        BoardUnreachable, BoardRefused, BoardBusy: it does not answer, does not let us in, or is not free in time.
    """
    where = checked("board", board, ("a board's name, address or config file", PATH[1]))
    choice = choose(board if isinstance(board, str) else str(where), checked("hw_type", hw_type, TEXT))
    pool = BoardPool("hil.connect", wait_s=checked("wait_s", wait_s, SECONDS))
    connected = pool.session(
        choice,
        runtimes=(checked("runtime", runtime, TEXT),),
        faults=checked("faults", faults, TEXTS, "for example ['crash']"),
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
    """Compile a model, run it on a board and compare it with its reference.

    Args:
        model: the path of a model's file, or a ``torch.nn.Module`` or ``torch.export.ExportedProgram`` itself.
        board: from :func:`connect`.
        inputs: name -> tensor, or texts as ``hil run --input`` takes; the rest is seeded random. Of a module they are
            the arguments of its ``forward``, positional as a sequence or by keyword as a mapping, and all are needed.
        context: a cache and isolated processes to share between runs; a new one where None. (``shop`` before.)
        options: fields of :class:`hil.controller.pipeline.stages.Options`.

    Returns:
        The case: true when it passed, with ``outcome``, ``reason``, ``result``, ``references``, ``verdicts``,
        ``timings`` and, where a stage failed, ``error``.

    Raises:
        UsageError: there is no such option or file, an argument is of the wrong kind, or the model does not take these
            inputs.
    """
    try:
        case = _run(model, board, inputs, context, options)
    except HilError as error:
        rename_in_error(error, as_keyword)
        raise
    if case.error is not None:
        rename_in_error(case.error, as_keyword)
    return replace(case, reason=rename_options(case.reason, as_keyword))


def _run(model: Any, board: Board, inputs: Any, context: RunContext | None, options: dict[str, Any]) -> Case:
    from hil.controller.storage.cache import Cache
    from hil.controller.storage.isolated import Isolated

    context = options.pop("shop", context)
    program = refused = None
    if is_torch(model):
        path = Path(f"{type(model).__name__}.pt2")
        try:
            program, inputs = exported(model, inputs)
        except ImportFailed as error:
            refused, inputs = error, ()
    else:
        path = checked("model", model, ("the path of a model's file", PATH[1]))
    chosen = options_of({"inputs": inputs, **options})
    if not all(hasattr(board, name) for name in ("config", "push", "load")):
        raise UsageError(
            f"board must be what hil.connect returns, got {board!r:.80}",
            hint="with hil.connect('sim') as board: hil.run(model, board)",
        )
    if board.closed:
        raise UsageError(f"{board.name} was given back", hint="connect to it again")
    if not isinstance(context, RunContext | None):
        raise UsageError(
            f"context must be a RunContext (hil.controller.storage.run_context) or None, got {context!r:.80}"
        )
    check_options(chosen, BoardChoice(board.config, board.name))
    if refused is not None:
        return Case(path.stem, path, chosen, Path()).ended(refused, Stage.IMPORT)
    with contextlib.ExitStack() as stack:
        if context is None:
            context = RunContext(Cache(), stack.enter_context(Isolated()))
        elif chosen.recompute or chosen.debug_ir is not None:
            # A cache makes things anew once for all who ask it to: here every call asks for itself.
            context = replace(context, cache=Cache(context.cache.root))
        folder = Path(stack.enter_context(temporary_folder("hil-")))
        (folder / "logs").mkdir()
        if program is not None:
            path = folder / path
            save_program(program, path)
        runner = Runner(context, lasting=False)
        case = runner.begin(path, chosen, folder)
        check_accepted_outputs([(chosen.accept, case.model)])
        return runner.whole(case, BoardSession(board))
