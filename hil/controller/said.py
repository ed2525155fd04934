"""What errors of other people's code say, in a line."""

from __future__ import annotations


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line that says something, cut to ``most`` characters; the error's kind where none does."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line[:most] for line in lines if line), type(error).__name__)
