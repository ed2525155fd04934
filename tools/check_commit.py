#!/usr/bin/env python3
"""Check commit messages: "area: imperative summary", at most 72 characters, then an empty line.

check_commit.py FILE            Check a message. Git's commit-msg hook calls this (scripts/install-hooks).
check_commit.py --range A..B    Check all commits of a revision range.

Commits from `git merge`, `git revert` and `git commit --fixup` are accepted.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

MAX_LENGTH = 72
EXAMPLE = "agent: close the stream on cancel"
_GENERATED = re.compile(r'Merge |Revert "|Reapply "|(?:fixup|squash|amend)! ')
_AREA = re.compile(r"[a-z0-9]+(?:[-/][a-z0-9]+)*: (?=\S)")
_FIRST_WORD = re.compile(r"[a-z][a-z0-9'-]*(?=[\s,:]|$)")
# Git writes the diff of `git commit --verbose` below this line.
_SCISSORS = re.compile(r"^# -+ >8 -+\n.*", re.M | re.S)


def find_errors(message: str) -> list[str]:
    """Return a text for each rule that a message breaks. The message must not contain comments."""
    subject, _, rest = message.strip("\n").partition("\n")
    if _GENERATED.match(subject):
        return []
    errors = []
    if len(subject) > MAX_LENGTH:
        errors.append(f"subject has {len(subject)} characters: use at most {MAX_LENGTH}")
    area = _AREA.match(subject)
    if area is None:
        errors.append("subject must be 'area: summary', with an area of lower-case letters, digits, '-' and '/'")
    elif not _FIRST_WORD.match(subject, area.end()):
        errors.append("summary must start with a lower-case word")
    if subject.endswith("."):
        errors.append("subject must not end with a full stop")
    if rest.partition("\n")[0].strip():
        errors.append("second line must be empty")
    return errors


def read_message(file: Path) -> str:
    """Return the commit message in git's file, without comments."""
    lines = _SCISSORS.sub("", file.read_text(encoding="utf-8")).splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def read_range(revisions: str) -> list[tuple[str, str]]:
    """Return the short IDs and messages of the commits in a range, without merges.

    Raises:
        SystemExit: git rejects the range.
    """
    command = ["git", "log", "-z", "--no-merges", "--format=%h %B", "--end-of-options", revisions, "--"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        print(done.stderr.strip(), file=sys.stderr)
        raise SystemExit(2)
    commits = [commit.partition(" ") for commit in done.stdout.split("\0") if commit]
    return [(name, message) for name, _, message in commits]


def main() -> int:
    """Check the messages. Return 1 if any message breaks a rule."""
    parser = argparse.ArgumentParser(description="Check commit messages.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", type=Path, metavar="FILE", help="file with a message")
    source.add_argument("--range", metavar="A..B", help="revision range")
    options = parser.parse_args()
    messages = read_range(options.range) if options.range else [("", read_message(options.file))]
    failed = [
        (name, message, errors) for name, message in messages if message.strip() and (errors := find_errors(message))
    ]
    for name, message, errors in failed:
        print(f"invalid commit message {name}".rstrip() + f": {message.strip().splitlines()[0]}", file=sys.stderr)
        print(*(f"  {error}" for error in errors), f"  example: {EXAMPLE}", sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
