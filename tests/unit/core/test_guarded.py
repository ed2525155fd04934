"""Calls into plugin code: exceptions and return values become typed errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hil.core.field_types import is_a
from hil.core.guarded import GuardedObject, format_value, guard_plugin
from hil.core.results import Artifact
from hil.errors import BoardLost, CompileFailed, HilError, ReferenceFailed, UsageError

WHO = "the compiler acme of the package acme 1.2"


class Silent(BaseException):
    def __str__(self) -> str:
        raise ValueError("an error without a text")


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (ValueError("boom\nmore"), "ValueError: boom"),
        (SystemExit(7), "SystemExit: 7"),
        (GeneratorExit(), "GeneratorExit"),
        (Silent(), "Silent"),
        (HilError("odd"), "odd"),
        (ReferenceFailed("odd"), "odd"),
    ],
)
def test_guarded_converts_any_exception_to_stage_error(raised: BaseException, text: str) -> None:
    with pytest.raises(CompileFailed) as caught, guard_plugin(WHO, CompileFailed, CompileFailed, UsageError):
        raise raised
    assert caught.value.message == f"{WHO} failed: {text}" and "Traceback" not in caught.value.detail


@pytest.mark.parametrize("kind", [CompileFailed, UsageError])
def test_guarded_adds_package_to_allowed_errors(kind: type[HilError]) -> None:
    with pytest.raises(kind) as caught, guard_plugin(WHO, CompileFailed, CompileFailed, UsageError):
        raise kind("no such operator", hint="another")
    assert (caught.value.message, caught.value.hint) == (f"no such operator; in {WHO}", "another")


def test_guarded_passes_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), guard_plugin(WHO, CompileFailed):
        raise KeyboardInterrupt


def test_shown_handles_value_without_text() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ValueError

    assert format_value(Odd()) == "a Odd" and len(format_value("x" * 1000)) == 80


class Client:
    name = 3

    def info(self) -> Any:
        return None

    def lines(self) -> Iterator[int]:
        yield 1
        raise SystemExit(7)

    @property
    def broken(self) -> int:
        raise ValueError("boom")


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda client: client.info(), "info() of the link usb failed: TypeError: it returned None: expected dict"),
        (lambda client: client.name, "name of the link usb failed: TypeError: it returned 3: expected str"),
        (lambda client: client.broken, "broken of the link usb failed: ValueError: boom"),
        (lambda client: client.gone(), "gone of the link usb failed: AttributeError"),
        (lambda client: list(client.lines()), "the link usb failed: SystemExit: 7"),
    ],
)
def test_guarded_object_checks_calls_attributes_and_items(use: Any, text: str) -> None:
    checks = {"info": is_a(dict), "name": is_a(str)}
    client = GuardedObject(Client(), "the link usb", BoardLost, checks=checks)
    with pytest.raises(BoardLost) as caught:
        use(client)
    assert caught.value.message.startswith(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [("files", ["a"]), ("files", {"a": "a"}), ("inputs", (3,)), ("cached", 1), ("seconds", "1"), ("flags", "abc")],
)
def test_type_check_rejects_field_of_wrong_type(field: str, value: Any) -> None:
    good: dict[str, Any] = {"runtime": "r", "main": "a", "files": {}, "digests": {}, "function": "", "compiler": "c"}
    is_a(Artifact)(Artifact(**good))
    with pytest.raises(TypeError, match=f"{field} is .*: expected "):
        is_a(Artifact)(Artifact(**{**good, field: value}))
