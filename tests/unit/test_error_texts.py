"""Callers match errors by type and field, never by text.

Libraries without error types are the exception: one place for each reads the library's text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sources import iter_trees

ROOT = Path(__file__).parents[2]
_FIELDS = {"message", "hint", "detail"}
_TESTS = {"startswith", "endswith", "find", "index", "count", "search", "match", "fullmatch", "findall", "finditer"}
# File -> the library that reports causes by text only, or why the text does not decide anything.
_ALLOWED = {
    "hil/agent/runtimes/executorch.py": "ExecuTorch",
    "hil/controller/cli/usage/errors.py": "click",
    "hil/controller/devices/ssh/paramiko/connect.py": "paramiko",
    "hil/controller/devices/ssh/paramiko/transport.py": "paramiko",
    "hil/controller/models/tensorflow/source.py": "Keras",
    "hil/controller/storage/screen/texts.py": "torch",
    "hil/core/guarded.py": "a message names a package once",
    "hil/testing/pytest_plugin/__init__.py": "pytest",
}


def reads_text(node: ast.AST) -> bool:
    """Return whether an expression is the text of an error."""
    if isinstance(node, ast.Attribute):
        return node.attr in _FIELDS
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return isinstance(node.args[0], ast.Name) and "error" in node.args[0].id
    # error.message.lower(), f"{error.message}", error.args[0]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("lower", "strip", "casefold") and reads_text(node.func.value)
    if isinstance(node, ast.JoinedStr):
        return any(isinstance(part, ast.FormattedValue) and reads_text(part.value) for part in node.values)
    return False


def compares_text(node: ast.AST) -> bool:
    """Return whether a node compares the text of an error with something."""
    if isinstance(node, ast.Compare):
        (operator, *_), texts = node.ops, [reads_text(one) for one in (node.left, *node.comparators)]
        # `known != error.message` only tells that something changed.
        is_change = isinstance(operator, (ast.Eq, ast.NotEq)) and isinstance(node.left, ast.Attribute) and not texts[0]
        return any(texts) and not is_change and not isinstance(operator, (ast.Is, ast.IsNot))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _TESTS and any(map(reads_text, (node.func.value, *node.args)))
    return False


def comparisons(tree: ast.AST) -> Iterator[int]:
    """Return the lines that compare the text of an error."""
    return (node.lineno for node in ast.walk(tree) if compares_text(node))


def test_no_code_compares_the_text_of_an_error():
    found = {}
    for name, tree in iter_trees(r"\.(message|hint|detail)\b|\bstr\(\w*error"):
        if lines := sorted(set(comparisons(tree))):
            found[f"hil/{name}"] = lines
    assert not found.keys() - _ALLOWED.keys(), {name: found[name] for name in found.keys() - _ALLOWED.keys()}
    assert not _ALLOWED.keys() - found.keys(), "no longer needed"


@pytest.mark.parametrize(
    "code",
    [
        "if 'locked' in str(error): pass",
        "if need in error.message: pass",
        "if error.hint.startswith('--function'): pass",
        "if re.search('--input', error.hint): pass",
        "if 'SIGILL' in f'{error.message} {error.detail}': pass",
        "if error.message == 'gone': pass",
    ],
)
def test_comparison_is_found(code: str):
    assert list(comparisons(ast.parse(code))) == [1]


@pytest.mark.parametrize("code", ["print(error.message)", "x = error.hint or 'none'", "if 'a' in texts: pass"])
def test_other_use_is_not_found(code: str):
    assert not list(comparisons(ast.parse(code)))
