#!/usr/bin/env python3
"""Measure how plain hil's English is, compared with the documentation of httpx, labgrid, datasette and pytest.

The tool reads guides, docstrings, comments, messages (raised errors, hints, help texts), test names and commit
subjects. It counts words that are rare in technical English, but were frequent in hil ("what", "its", "told",
"beside"). The limit of a word is about twice the rate in those projects, in uses per 10,000 words. The excess of an
area is the sum of the rates above the limits.

    check_prose.py                  print a table, and fail if the excess or a sentence length is above its limit
    check_prose.py --files          print the worst files of each area too
    check_prose.py --show AREA TEXT...   print the worst sentences of an area, in files whose path contains a TEXT

A low number does not prove that the prose is good. Write for a reader with basic English first, then check the number.
"""

from __future__ import annotations

import ast
import collections
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

MAX_EXCESS = 120
MAX_SENTENCE_WORDS = 25  # limit of the 90th percentile
LIMITS = {  # word -> maximum uses in 10,000 words
    "what": 12, "where": 20, "whose": 3, "whoever": 0, "whatever": 1, "nobody": 0, "nothing": 3, "no": 30, "its": 25,
    "it": 110, "that": 140, "of": 290, "one": 35, "ones": 2, "told": 0, "tell": 2, "tells": 1, "say": 2, "says": 1,
    "said": 0, "beside": 1, "anew": 0, "own": 10, "lies": 0, "stands": 0, "stand": 1, "hold": 2, "holds": 2,
    "there": 18, "else": 3, "those": 10, "too": 4, "each": 30, "folder": 3, "folders": 2, "answer": 3, "answers": 2,
    "comes": 3, "came": 1, "goes": 2, "gone": 1, "had": 3, "kept": 2, "keeps": 3, "asked": 1, "asks": 1, "again": 4,
    "once": 8, "until": 4, "mend": 0, "mended": 0, "mends": 0, "mending": 0, "neither": 2, "kin": 0, "is": 290,
    "elsewhere": 1, "heard": 0, "meant": 1, "words": 2, "away": 1, "others": 3, "another": 8, "several": 4,
    "whether": 12, "also": 40, "alone": 2, "left": 5, "made": 10,
}  # fmt: skip
AREAS = ("docs", "docstrings", "comments", "messages", "tests", "commits")
# Comments that are instructions for tools.
_SKIPPED_COMMENTS = ("#!", "# noqa", "# type", "# pragma")


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words."""
    return re.findall(r"[a-z']+", text.lower())


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences of at least three words."""
    parts = re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n(?=[-*#|])", text)
    return [part.strip() for part in parts if len(split_words(part)) > 2]


def strip_markdown(text: str) -> str:
    """Remove code, and the targets of links, from Markdown."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"(?m)^ {4,}\S.*$", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`", "X", text)


def read_literal(node: ast.AST) -> str:
    """Return the text of a literal, with X for expressions; "" for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    if isinstance(node, ast.BinOp):
        return read_literal(node.left) + read_literal(node.right)
    if isinstance(node, ast.IfExp):
        return read_literal(node.body) + " \n\n" + read_literal(node.orelse)
    return ""


def read_python(path: Path, is_test: bool) -> dict[str, list[str]]:
    """Return the texts of a Python file by area."""
    source = path.read_text(errors="ignore")
    found: dict[str, list[str]] = collections.defaultdict(list)
    for node in ast.walk(ast.parse(source)):
        if is_test:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found["tests"].append(node.name[5:].replace("_", " ") + ".")
            continue
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                found["docstrings"].append(re.sub(r"`+[^`]*`+", "X", text))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found["messages"] += [text for one in node.exc.args if (text := read_literal(one))]
        elif isinstance(node, ast.Call):
            texts = [one.value for one in node.keywords if one.arg in ("hint", "help", "short_help", "epilog")]
            found["messages"] += [text for one in texts if (text := read_literal(one))]
    if not is_test:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and not token.string.startswith(_SKIPPED_COMMENTS):
                found["comments"].append(token.string.lstrip("# "))
    return found


def collect(root: Path) -> dict[str, dict[str, list[str]]]:
    """Return the texts of a checkout: area -> file -> texts."""
    texts: dict[str, dict[str, list[str]]] = {area: collections.defaultdict(list) for area in AREAS}
    for name in _list_files(root):
        path = root / name
        if name.endswith(".md") and not name.startswith("tests/"):
            texts["docs"][name].append(strip_markdown(path.read_text(errors="ignore")))
        elif name.endswith(".py") and "_pb2" not in name:
            for area, found in read_python(path, name.startswith("tests/")).items():
                texts[area][name] += found
    texts["commits"]["git log -300"] = [
        f"{line}." for line in _run_git(root, "log", "-300", "--format=%s").splitlines()
    ]
    return texts


def score(text: str) -> tuple[float, int, collections.Counter[str]]:
    """Return the excess of a text, the number of its words, and their counts."""
    found = split_words(text)
    count = collections.Counter(found)
    total = max(len(found), 1)
    return sum(max(0.0, count[word] / total * 1e4 - most) for word, most in LIMITS.items()), total, count


def show_sentences(files: dict[str, list[str]], patterns: Iterable[str]) -> None:
    """Print the worst sentences of the files whose path contains a pattern."""
    wanted = list(patterns)
    rows = []
    for name, parts in files.items():
        if not wanted or any(pattern in name for pattern in wanted):
            for sentence in split_sentences("\n\n".join(parts)):
                hits = sum(1 for word in split_words(sentence) if LIMITS.get(word, 1000) < 30)
                rows.append((hits / max(len(split_words(sentence)), 6), name, " ".join(sentence.split())))
    for _, name, sentence in sorted(rows, reverse=True)[:60]:
        print(f"{name}: {sentence[:300]}")


def show_area(area: str, files: dict[str, list[str]], by_file: bool) -> bool:
    """Print an area's row. Return True if the area is within the limits."""
    text = "\n\n".join(part for parts in files.values() for part in parts)
    excess, total, count = score(text)
    lengths = sorted(len(split_words(sentence)) for sentence in split_sentences(text)) or [0]
    middle, long = lengths[len(lengths) // 2], lengths[int(len(lengths) * 0.9)]
    over = sorted(((count[word] / total * 1e4 - most, word) for word, most in LIMITS.items()), reverse=True)[:9]
    worst = " ".join(f"{word} {count[word] / total * 1e4:.0f}/{LIMITS[word]}" for share, word in over if share > 0)
    print(f"{area:11}{total:9,}{excess:8.0f}{middle:5}{long:5}  {worst}")
    if by_file:
        scored = [(name, *score("\n".join(parts))[:2]) for name, parts in files.items()]
        rows = sorted(((of_file, size, name) for name, of_file, size in scored if size > 150), reverse=True)
        for of_file, size, name in rows[:12]:
            print(f"{'':11}{size:9,}{of_file:8.0f}  {name}")
    # Commits have no limit, because old subjects cannot be changed.
    return area == "commits" or (excess <= MAX_EXCESS and long <= MAX_SENTENCE_WORDS)


def main() -> int:
    """Run the command line. Return 1 if an area is above its limits."""
    texts = collect(Path(__file__).parents[1])
    if "--show" in sys.argv:
        area, *patterns = sys.argv[sys.argv.index("--show") + 1 :]
        show_sentences(texts[area], patterns)
        return 0
    print(f"{'area':11}{'words':>9}{'excess':>8}{'p50':>5}{'p90':>5}  over their limit (uses in 10,000 words)")
    within = [show_area(area, texts[area], "--files" in sys.argv) for area in AREAS]
    if not all(within):
        print(f"limits: excess {MAX_EXCESS}, p90 {MAX_SENTENCE_WORDS} words a sentence")
    return int(not all(within))


def _run_git(root: Path, *command: str) -> str:
    """Return the output of a git command, or "" outside of a repository."""
    return subprocess.run(["git", "-C", root, *command], capture_output=True, text=True).stdout


def _list_files(root: Path) -> list[str]:
    """List the files of the repository. Without git, list all files outside of hidden directories."""
    if names := _run_git(root, "ls-files").splitlines():
        return [name for name in names if (root / name).is_file()]
    files = [path.relative_to(root) for path in root.rglob("*") if path.suffix in (".md", ".py")]
    return [str(path) for path in files if path.parts[0] != "build" and not path.parts[0].startswith(".")]


if __name__ == "__main__":
    sys.exit(main())
