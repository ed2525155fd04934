"""Class names in hil are unique, and most private functions have a verb and a noun in their name."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Ten times as fast as ast. Also finds examples in docstrings.
_DEFINITION = re.compile(r"^ *(?:async )?(def|class) (\w+)", re.MULTILINE)
# Largest share of private functions and methods with one word: `_close`, `_run`.
MAX_ONE_WORD = 0.35
# Class names with more than one definition -> reason.
DUPLICATES = {
    "Refused": "exceptions: of the script on a board, and of an upload to hil web",
}


@functools.cache
def definitions() -> list[tuple[str, str, str]]:
    """Return (file, "def" or "class", name) of each function and class in hil."""
    return [
        (str(path.relative_to(ROOT)), kind, name)
        for path in sorted((ROOT / "hil").rglob("*.py"))
        if "_pb2" not in path.name
        for kind, name in _DEFINITION.findall(path.read_text())
    ]


def test_class_names_are_unique():
    files = defaultdict(list)
    for file, kind, name in definitions():
        if kind == "class":
            files[name].append(file)
    duplicates = {name: places for name, places in files.items() if len(places) > 1}
    assert {name: places for name, places in duplicates.items() if name not in DUPLICATES} == {}
    assert sorted(set(DUPLICATES) - set(duplicates)) == [], "names in DUPLICATES that are unique"


def test_private_functions_are_named_by_several_words():
    private = [
        (file, name)
        for file, kind, name in definitions()
        if kind == "def" and name.startswith("_") and not name.endswith("__")
    ]
    one_word = Counter(file for file, name in private if "_" not in name.strip("_"))
    share = one_word.total() / len(private)
    worst = "\n".join(f"{count:3} {file}" for file, count in one_word.most_common(20))
    assert share <= MAX_ONE_WORD, f"{share:.1%} of the private functions have one word:\n{worst}"
