"""A selector's text as tokens, and errors that say where in it something is wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hil.errors import UsageError

_LONGEST = 2000
_WORD = r"[^\s\"'()&|,=<>!]+"
_TOKEN = re.compile(
    rf"""(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<mark>&&|\|\||==|!=|>=|<=|[=<>!(),])|(?P<word>{_WORD})""",
    re.DOTALL,
)
_KEYWORDS = ("and", "or", "not", "in")
_HINT = 'for example "chip=a53, mem>=1GiB, runtimes in (iree, onnxruntime), !gpu"'


@dataclass(frozen=True)
class Token:
    """A piece of a selector.

    Attributes:
        kind: ``quoted``, ``mark`` (punctuation and keywords) or ``word``.
        text: what it says, without quotes.
        at: where it begins.
    """

    kind: str
    text: str
    at: int


class Reader:
    """A selector's tokens, one after another.

    Args:
        text: the selector.

    Raises:
        UsageError: a piece of it is no token.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > _LONGEST:
            raise UsageError(f"a selector has {len(text):,} characters, of at most {_LONGEST:,}", hint=_HINT)
        for place, character in enumerate(text):
            if not (character.isprintable() or character.isspace()):
                raise self._error(_no_token(character), place)
        self._tokens: list[Token] = []
        at = _after_space(text, 0)
        while at < len(text):
            found = _TOKEN.match(text, at)
            if not found:
                raise self._error(_no_token(text[at]), at)
            self._tokens.append(_token(found))
            at = _after_space(text, found.end())
        self._index = 0

    @property
    def next(self) -> Token | None:
        """The token that comes, or None at the end."""
        return self._tokens[self._index] if self._index < len(self._tokens) else None

    def takes(self, *marks: str) -> Token | None:
        """Go over the next token if it is one of these marks or keywords."""
        token = self.next
        if token is None or token.kind != "mark" or token.text not in marks:
            return None
        self._index += 1
        return token

    def expects(self, mark: str, else_: str) -> None:
        """Go over a mark that must come.

        Raises:
            UsageError: something else comes.
        """
        if not self.takes(mark):
            raise self.error(else_)

    def value(self, what: str) -> Token:
        """Go over a word or a quoted text.

        Raises:
            UsageError: something else comes.
        """
        token = self.next
        if token is None or token.kind == "mark":
            raise self.error(f"{what} is missing")
        self._index += 1
        return token

    def error(self, what: str, *, at: Token | None = None) -> UsageError:
        """What is wrong at a token, else at the one that comes."""
        token = at or self.next
        return self._error(what, token.at if token else len(self._text.rstrip()))

    def _error(self, what: str, at: int) -> UsageError:
        return UsageError(f"selector {self._text!r}, character {at + 1}: {what}", hint=_HINT)


def quoted(text: str) -> str:
    """A label or a value as a selector writes it: in quotes where it would be read otherwise without them."""
    if re.fullmatch(_WORD, text) and text.lower() not in _KEYWORDS:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _token(found: re.Match[str]) -> Token:
    kind, text = str(found.lastgroup), found[0]
    if kind == "quoted":
        text = re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)
    elif kind == "word" and text.lower() in _KEYWORDS:
        kind, text = "mark", text.lower()
    return Token(kind, text, found.start())


def _no_token(character: str) -> str:
    if character in "\"'":
        return "a quote is not closed"
    return "`and` is && or a comma, `or` is ||" if character in "&|" else f"{character!r} cannot stand here"
