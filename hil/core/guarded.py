"""Call plugin code so that every failure becomes an error that names the package.

Packages register code as entry points (docs/extending.md). Calls to such code use :func:`guard_plugin`, and
:mod:`hil.core.field_types` checks the results.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from hil.core.installed import list_entry_points
from hil.errors import HilError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
_SHOWN = 80


def format_package(point: EntryPoint) -> str:
    """Return the name and version of an entry point's package."""
    try:
        return f"{point.dist.name} {point.dist.version}" if point.dist else "?"
    except Exception:  # invalid metadata in the package
        return "?"


def find_package(group: str, name: str) -> str:
    """Return the package that registered a name in a group, with version; "" for hil's entry points."""
    package = next(
        (format_package(point) for point in reversed(list(list_entry_points(group))) if point.name == name), ""
    )
    return "" if package.partition(" ")[0] == "hil" else package


def format_plugin(kind: str, group: str, name: str) -> str:
    """Return the text for a plugin in errors: ``the recipe round of the package cutter 1.0``."""
    package = find_package(group, name)
    return f"the {kind} {name} of the package {package}" if package else f"the {kind} {name}"


def format_value(value: object) -> str:
    """Return a truncated repr, or the type if repr fails."""
    try:
        return f"{value!r:.{_SHOWN}}"
    except Exception:
        return f"a {type(value).__name__}"


def format_error(error: BaseException, *, whole: bool = False) -> str:
    """Return an error's class and the first line of its text, or the full text if ``whole`` is set."""
    try:
        text = str(error)
    except Exception:
        text = ""
    if not whole:
        text = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def name_package(error: HilError, who: str) -> None:
    """Add the plugin's text from :func:`format_plugin` to an error, unless it is empty or already in the message."""
    if who and who not in error.message:
        error.add(f"in {who}")


@contextlib.contextmanager
def guard_plugin(who: str, failure: Callable[..., HilError], *allowed: type[HilError]) -> Iterator[None]:
    """Run plugin code. Every error that leaves the block names the package.

    Args:
        who: text for the plugin in errors: see :func:`format_plugin`.
        failure: error class of the stage.
        allowed: error classes that the code may raise; any other error becomes ``failure``.

    Raises:
        HilError: ``failure`` with the call stack as its detail, or one of ``allowed``.
        KeyboardInterrupt: the user interrupted hil.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except allowed as error:
        name_package(error, who)
        raise
    except HilError as error:
        text = f"{who} failed: {error.message}"
        raise failure(text, hint=error.hint, detail=error.detail or format_calls(error)) from error
    except BaseException as error:
        raise failure(f"{who} failed: {format_error(error)}", detail=format_calls(error)) from error


def format_calls(error: BaseException) -> str:
    """Return an error's call stack, outermost call first, without the frame that caught it."""
    return "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[1:])).rstrip()


def guard(
    kind: str, group: str, name: str, failure: Callable[..., HilError], *allowed: type[HilError]
) -> contextlib.AbstractContextManager[None]:
    """Return :func:`guard_plugin` for a plugin's entry point. For hil's entry points, return a null context."""
    if not find_package(group, name):
        return contextlib.nullcontext()
    return guard_plugin(format_plugin(kind, group, name), failure, *allowed)


def call_with_time_limit(function: Callable[[], T], seconds: float) -> T:
    """Call plugin code in a thread and return the result.

    Python cannot end a thread: after the limit, the code continues in the background, and does not delay the end of
    the process.

    Raises:
        HilError: the code exceeded the time limit.
        BaseException: the error of the code.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="hil-plugin", daemon=True).start()
    done, _ = concurrent.futures.wait([future], seconds)
    if not done:
        raise HilError(f"no result within {seconds:g} s")
    return future.result()


class GuardedObject:
    """Proxy for a plugin's object that accesses attributes and methods through :func:`guard_plugin`.

    Args:
        who, failure, allowed: see :func:`guard_plugin`.
        checks: attribute or method name -> check that raises TypeError for an invalid value or result.
    """

    def __init__(
        self,
        thing: object,
        who: str,
        failure: type[HilError],
        *allowed: type[HilError],
        checks: Mapping[str, Callable[[Any], None]],
    ) -> None:
        self._thing, self._who, self._checks = thing, who, checks
        self._how = (failure, *allowed)

    def __getattr__(self, name: str) -> Any:
        check = self._checks.get(name, _accept)
        with guard_plugin(f"{name} of {self._who}", *self._how):
            value = getattr(self._thing, name)
            if not callable(value):
                check(value)
                return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with guard_plugin(f"{name}() of {self._who}", *self._how):
                result = value(*args, **kwargs)
                check(result)
            return _GuardedIterator(result, self._who, self._how) if hasattr(result, "__next__") else result

        return call


class _GuardedIterator:
    """Proxy for a plugin's iterator, which may fail at any item."""

    def __init__(self, items: Iterator[Any], who: str, how: tuple[type[HilError], ...]) -> None:
        self._items, self._who, self._how = items, who, how

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with guard_plugin(self._who, *self._how):
            item = next(self._items, _END)
        if item is _END:
            raise StopIteration
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)


_END = object()


def _accept(value: Any) -> None:
    """Accept any value."""
