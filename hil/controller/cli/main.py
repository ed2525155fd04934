"""The `hil` command: one file a verb, loaded when it is called, so that `hil --help` starts at once."""

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

# verb -> its line in `hil --help`. The verb's module has a command of the same name.
VERBS = {
    "run": "Compile a model, run it on a board, compare it with a CPU reference.",
    "bench": "Measure how fast a model is on a board, and whether another is faster.",
    "compile": "Compile a model for a board and keep the program.",
    "compare": "Compare two stored runs or two .npy files.",
    "layers": "List a model's layers, and save them as models of their own.",
    "bisect": "Find the first layer of a model that goes wrong on a board.",
    "suite": "Run suites of models and their layers; expected failures and reports.",
    "study": "Take training steps through several compilers, stage by stage.",
    "flows": "List the flows: compiler, options, quantisation and runtime by name.",
    "trace": "Make a stored trace's calls again on a board, compare and show traces.",
    "bundle": "Keep a program with its test cases in one file, and check boards against it.",
    "board": "List, check, set up and reset boards.",
    "farm": "Share boards: one queue for many boards and many users.",
    "profile": "Look at profiles: what took the time, in the terminal, in Perfetto, in SQL.",
    "runs": "List, show and delete stored runs.",
    "web": "Show what is stored in a browser.",
    "publish": "Send a stored session to a hil web.",
    "cache": "List and clean the cache of compiled programs and reference results.",
    "completion": "Print the shell's completion script.",
}


_DETAIL_LINES = 12
# The exit code of Unix tools whose reader is gone (`hil cache ls | head -1`): it says nothing about a model.
_EXIT_UNREAD = 128 + signal.SIGPIPE
_FIELDS = ("outcome", "hint", "stage", "board", "detail")

_ERRORS = "hil-plain"
# One character for one, so that columns stay aligned. Other characters, such as letters of a file's name, are escaped.
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
# Python looks for cycles after so many new objects, by default after 700: what a verb imports alone makes a hundred
# times that, and none of it is garbage.
_NEW_OBJECTS = 100_000
# The threads of OpenBLAS, which numpy starts when it is imported, wait for work for 2^26 cycles before they sleep, a
# core each. With this for 2^4, here and in the processes that are started.
_BLAS = ("OPENBLAS_THREAD_TIMEOUT", "4")


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from hil.core import own_version

        click.echo(f"hil {own_version()}")
        ctx.exit()


@group(
    cls=LazyGroup,
    commands={verb: (f"hil.controller.cli.{verb}", line) for verb, line in VERBS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Does this compiled model give the right answer on this hardware, how fast, and if not, where does it go wrong?

    \b
    Example:
      hil run examples/digits/digits_cnn.onnx --runtime-hw-type sim

    \b
    Exit codes:
      0  all passed
      1  an answer differs
      2  bad usage or configuration
      3  a stage of the model's own failed
      4  the board failed
      5  nothing ran
      130  interrupted
    """


def main() -> None:
    """Be the process of a command, which ends with its exit code."""
    _open_streams()
    tolerate_any_locale()
    show_visibly()
    gc.set_threshold(_NEW_OBJECTS)
    os.environ.setdefault(*_BLAS)
    codes: list[int] = []
    # The first that is registered is the last that is called, when threads have ended and folders are removed.
    atexit.register(_end, codes)
    codes.append(call())
    sys.exit(codes[0])


def _open_streams() -> None:
    """Give a command that was started without standard streams ones that lead nowhere."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free descriptor: that of the stream. A file that is opened later is never taken for it.
            assert os.open(os.devnull, os.O_RDWR) == number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _end(codes: Sequence[int]) -> None:
    """End at once, and leave it to the kernel to free what is in memory; not after a traceback, which is no code."""
    sys.stdout.flush()
    sys.stderr.flush()
    for code in codes:
        os._exit(code)


def call() -> int:
    """Run the command and return its exit code; errors are reported without a traceback."""
    try:
        code = _run()
        sys.stdout.flush()
    except BrokenPipeError:
        _stop_writing()
        code = _EXIT_UNREAD
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _stop_writing()
        print(f"hil: cannot write: {error.strerror}", file=sys.stderr)
        code = EXIT_USAGE
    return code


def _stop_writing() -> None:
    """Discard the rest of the output, which Python would otherwise try to write at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run() -> int:
    """Run the command and return its exit code."""
    wants_json = "--json" in sys.argv
    try:
        code = cli.main(prog_name="hil", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        code = _report("interrupted", wants_json, EXIT_INTERRUPTED, kind="Interrupted")
        # CPython remembers an unhandled Ctrl-C within an exec (dataclasses use exec), and then ends `python -m` by that
        # signal whatever the exit code is. Another exec makes it forget.
        exec("")
    except click.ClickException as error:
        code = _report(error.format_message(), wants_json, 2, usage=error)
    except HilError as error:
        code = _report(error.message, wants_json, error.exit_code, kind=type(error).__name__, error=error)
    except SystemExit as ended:
        # No command ends that way, but Click and rich do once their reader is gone.
        raise BrokenPipeError from ended
    return code if isinstance(code, int) else 0


def _report(
    text: str,
    wants_json: bool,
    code: int,
    *,
    kind: str = "UsageError",
    usage: click.ClickException | None = None,
    error: HilError | None = None,
) -> int:
    """Report an error: as text on stderr, and with ``--json`` as a document on stdout."""
    if wants_json:
        error_document = {"kind": kind, "message": text, **{name: getattr(error, name, "") or "" for name in _FIELDS}}
        print(json.dumps({"schema": 1, "error": error_document, "exit_code": code}))
    if usage is not None:
        usage.show()
    else:
        print(f"hil: {error or text}", file=sys.stderr)
        for line in error.detail.strip().splitlines()[-_DETAIL_LINES:] if error else ():
            print(f"    {line}", file=sys.stderr)
    return code


def tolerate_any_locale() -> None:
    """Prevent text from ending a command with a traceback, whatever the locale's encoding is.

    Files without a named encoding are UTF-8 from now on, in this process and in Python processes that it starts.
    """
    codecs.register_error(_ERRORS, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
    if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement of characters that a stream's encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_plain_sign, error.object[error.start : error.end])), error.end


def _plain_sign(sign: str) -> str:
    if ord(sign) in _SPINNER:
        return "."
    return _PLAIN.get(sign) or sign.encode("ascii", "backslashreplace").decode()


if __name__ == "__main__":
    main()
