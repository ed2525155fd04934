"""Run the `hil` command. A verb's module is loaded only for this verb, so that `hil --help` is fast."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import errno
import gc
import io
import json
import locale
import os
import signal
import sys
from collections.abc import Sequence

import click

from hil.controller.cli.commands import group
from hil.controller.cli.lazy import LazyGroup
from hil.core.text import show_visibly
from hil.errors import EXIT_INTERRUPTED, EXIT_USAGE, HilError

# Verb -> module in hil.controller.cli and line in `hil --help`. The module has a command with the verb's name.
VERBS = {
    "init": ("project.init", "Create a project with a test and a CI file."),
    "run": ("running.run", "Compile a model, run it on a board, compare it with a CPU reference."),
    "bench": ("running.bench", "Measure a model's speed on a board, or compare two models."),
    "eval": ("running.eval", "Score a model on a dataset, on a board and on a CPU reference."),
    "rerun": ("running.rerun", "Repeat a stored bench on its board, and report what differs."),
    "compile": ("running.compile", "Compile a model for a board and write the program to a file."),
    "compare": ("stored.compare", "Compare two stored runs or two .npy files."),
    "layers": ("analysis.layers", "List a model's layers, and save them as separate models."),
    "bisect": ("analysis.bisect", "Find the first layer of a model that is wrong on a board."),
    "reduce": ("analysis.reduce", "Reduce a failing model to the smallest model with the same failure."),
    "suite": ("running.suite", "Run suites of models and layers, with expected failures and reports."),
    "study": ("running.study", "Run training steps through multiple compilers, stage by stage."),
    "flows": ("flows", "List the flows: compiler, options, quantization and runtime by name."),
    "trace": ("running.trace", "Replay a stored trace on a board; compare and show traces."),
    "bundle": ("running.bundle", "Bundle a program with test cases in a file, and check boards with it."),
    "new-plugin": ("plugins.new_plugin", "Create a package that adds a chip, board or reference."),
    "plugin": ("plugins.plugin", "Check packages that extend hil."),
    "board": ("board.board", "Add, list, check, set up and reset boards."),
    "farm": ("farm.farm", "Share boards: one queue for many boards and many users."),
    "profile": ("stored.profile", "View profiles in the terminal, in Perfetto, or with SQL."),
    "runs": ("stored.runs", "List, show, export and delete stored runs."),
    "gate": ("running.gate", "Decide whether a commit makes outputs wrong or programs slower."),
    "history": ("stored.history", "Keep measurements over time, with commits, boards and programs."),
    "web": ("stored.web", "Show stored results in a browser."),
    "triage": ("stored.triage", "Record who owns a failure, and which failures are known."),
    "notify": ("stored.notify", "Send messages about the causes of new failures."),
    "publish": ("stored.publish", "Send a stored session to a hil web server."),
    "config": ("project.config", "Show the effective settings, and print schemas of config files."),
    "doctor": ("project.doctor", "Check the environment, and print a fix for each problem."),
    "cache": ("stored.cache", "List and clean the cache of compiled programs and reference results."),
    "help": ("usage.help", "Show the help of a command."),
    "completion": ("usage.completion", "Print the shell's completion script."),
}


_DETAIL_LINES = 12
# Environment variable that the script of `hil completion` sets.
_COMPLETE = "_HIL_COMPLETE"
# Unix exit code after SIGPIPE (`hil cache ls | head -1`), which is not a result of a model.
_EXIT_UNREAD = 128 + signal.SIGPIPE
# Errors that a path from the user or from a file may cause in any system call.
_OF_A_NAME = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM}
_FIELDS = ("outcome", "hint", "stage", "board", "detail")

_ERRORS = "hil-plain"
# Single-character replacements, which preserve column alignment. Other characters, such as letters in file names,
# are escaped.
_PLAIN = {
    "…": "~",
    "·": ".",
    "→": ">",
    "•": "*",
    "—": "-",
    "\N{EN DASH}": "-",
    "\N{MULTIPLICATION SIGN}": "x",
    "µ": "u",
    "\N{NO-BREAK SPACE}": " ",
}
_PLAIN |= dict.fromkeys("─━═╸╺╌┄", "-") | dict.fromkeys("│┃║", "|") | dict.fromkeys("├└┌┐┘┤┬┴┼╭╮╰╯╞╡", "+")
_PLAIN |= dict(zip("▁▂▃▄▅▆▇█", "._-=+*##", strict=True))
_SPINNER = range(0x2800, 0x2900)
# Number of new objects between garbage collections. Python's default is 700, but a command's imports create a hundred
# times as many objects and no garbage.
_NEW_OBJECTS = 100_000
# numpy starts OpenBLAS threads on import. Each thread spins on a core for 2^26 cycles before it sleeps. Reduce this to
# 2^4 cycles, here and in child processes.
_BLAS = ("OPENBLAS_THREAD_TIMEOUT", "4")


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from hil.core import own_version

        click.echo(f"hil {own_version()}")
        ctx.exit()


@group(
    cls=LazyGroup,
    commands={verb: (f"hil.controller.cli.{module}", line) for verb, (module, line) in VERBS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Test compiled ML models on hardware: compare outputs with a reference, measure speed, locate errors.

    \b
    Example:
      hil run example:digits_cnn --runtime-hw-type sim

    \b
    Exit codes:
      0  all passed
      1  an output differs
      2  bad usage or configuration
      3  a stage of the model failed
      4  the board failed
      5  nothing ran
      70  hil itself failed
      130  interrupted
    """


def main() -> None:
    """Run a command, and end the process with the exit code that the command returns."""
    _open_streams()
    tolerate_any_locale()
    show_visibly()
    gc.set_threshold(_NEW_OBJECTS)
    os.environ.setdefault(*_BLAS)
    codes: list[int] = []
    # Python calls the first registered handler last, after other threads have ended and directories are removed.
    atexit.register(_end, codes)
    codes.append(call())
    sys.exit(codes[0])


def _open_streams() -> None:
    """Open missing standard streams on the null device."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # This opens the lowest free descriptor, which is the number of the stream. Otherwise, a file opened later
            # would get this number.
            assert os.open(os.devnull, os.O_RDWR) == number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _end(codes: Sequence[int]) -> None:
    """Exit with the first of ``codes``, and let the kernel free the memory.

    If ``codes`` is empty (after a traceback), do nothing.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for code in codes:
        os._exit(code)


def call() -> int:
    """Run the command and return the exit code. Report errors without a traceback."""
    try:
        code = _run()
        sys.stdout.flush()
    except BrokenPipeError:
        _stop_writing()
        code = _EXIT_UNREAD
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _stop_writing()
            print(f"hil: cannot write: {error.strerror}", file=sys.stderr)
            code = EXIT_USAGE
        elif error.errno in _OF_A_NAME and error.filename:
            code = _report(f"{os.fsdecode(error.filename)}: {error.strerror}", _wants_json(), EXIT_USAGE)
        else:
            code = _report_crash(error)
    except Exception as error:
        code = _report_crash(error)
    return code


def _report_crash(error: Exception) -> int:
    from hil.core.crash import report_crash

    internal = report_crash(error)
    return _report(internal.message, _wants_json(), internal.exit_code, kind="InternalError", error=internal)


def _stop_writing() -> None:
    """Redirect stdout to the null device. Otherwise, Python would report an error of stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run() -> int:
    """Run the command and return the exit code."""
    wants_json = _wants_json()
    try:
        if instruction := os.environ.get(_COMPLETE):
            from hil.controller.cli.usage.completion import print_completion

            return print_completion(cli, instruction)
        code = cli.main(prog_name="hil", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        code = _report("interrupted", wants_json, EXIT_INTERRUPTED, kind="Interrupted")
        # CPython remembers an unhandled Ctrl-C inside an exec (dataclasses use exec). Then `python -m` ends by this
        # signal, regardless of the exit code. A second exec resets this state.
        exec("")
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = EXIT_USAGE
    except click.ClickException as error:
        from hil.controller.cli.usage.errors import convert_usage_error

        converted = convert_usage_error(error)
        code = _report(converted.message, wants_json, EXIT_USAGE, error=converted)
    except HilError as error:
        code = _report(error.message, wants_json, error.exit_code, kind=type(error).__name__, error=error)
    except SystemExit as ended:
        # Click and rich raise this if the reader of stdout has exited. Commands do not raise this.
        raise BrokenPipeError from ended
    return code if isinstance(code, int) else 0


def _wants_json() -> bool:
    """Return True if the command has the option ``--json``, before the ``--`` of a command for another program."""
    words = sys.argv[1:]
    return "--json" in words[: words.index("--") if "--" in words else None]


def _report(
    text: str,
    wants_json: bool,
    code: int,
    *,
    kind: str = "UsageError",
    error: HilError | None = None,
) -> int:
    """Report an error: as text on stderr, and with ``--json`` as a document on stdout."""
    if wants_json:
        from hil.controller.records.commands.errors import ErrorDetails, ErrorDocument
        from hil.controller.records.console import ConsoleQuoteRecord

        quotes = [ConsoleQuoteRecord(**vars(quote)) for quote in error.console] if error else []
        fields = {name: getattr(error, name, "") or "" for name in _FIELDS}
        details = ErrorDetails(kind=kind, message=text, console=quotes, **fields)
        print(json.dumps({"schema": 1, **ErrorDocument(error=details, exit_code=code).to_json()}))
    print(f"hil: {error or text}", file=sys.stderr)
    for line in error.detail.strip().splitlines()[-_DETAIL_LINES:] if error else ():
        print(f"    {line}", file=sys.stderr)
    return code


def tolerate_any_locale() -> None:
    """Prevent encoding errors from ending a command with a traceback, for every locale.

    Also make UTF-8 the default encoding of files, in this process and in Python child processes.
    """
    codecs.register_error(_ERRORS, _replace_unencodable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
    if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Return a replacement for characters that a stream's encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_replace_sign, error.object[error.start : error.end])), error.end


def _replace_sign(sign: str) -> str:
    if ord(sign) in _SPINNER:
        return "."
    return _PLAIN.get(sign) or sign.encode("ascii", "backslashreplace").decode()


if __name__ == "__main__":
    main()
