"""Search for cases by name, model, board, outcome, first wrong layer and message."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hil.controller.web.index.sessions import SELECT_CASES, IndexedSession, list_sessions_where
from hil.controller.web.session.wrong_layers import BisectedLayer, find_wrong_layers
from hil.controller.web.text.addresses import PageQuery, choose_page
from hil.controller.web.text.parameters import InvalidParameter
from hil.errors import did_you_mean, format_expected

# Maximum results to read, newest first, maximum words of a query, and cases per page.
MAX_RESULTS, MAX_WORDS, ROWS = 2000, 8, 50
# The trigram index needs three characters. Shorter words are searched in all texts.
_TRIGRAM = 3
# Field of a query such as `board:pi` -> column. The order is the order of the scores.
FIELDS = {"case": "name", "model": "model", "board": "board", "outcome": "outcome", "message": "message"}
LAYER = "layer"
# Start of a word that looks like a field.
_FIELD = re.compile(r"[a-z]{3,}:[a-z]")
# Score of a match in each column. A match of the name scores more if it is at the start, or is the whole name.
_SCORES = {"name": 5, "model": 4, "board": 3, "outcome": 3, "message": 1}
# Keys of outcomes without a wrong layer, and keys of models and operators from JSON.
_PASSING = "select key from words where word in ('PASS', 'XFAIL', 'SKIP', '')"
_LAYERS = (
    "select m.key, o.key from json_each(?) join words m on m.word = json_extract(value, '$[0]')"
    " join words o on o.word = json_extract(value, '$[1]')"
)
_LAYER_SCORE, _START_SCORE, _WHOLE_SCORE = 4, 6, 8


@dataclass(frozen=True)
class SearchQuery(PageQuery):
    """Query parameters of a search."""

    q: str = ""  # words, each optionally with a field: `conv board:pi outcome:FAIL`
    page: int = 1


@dataclass(frozen=True)
class SearchWord:
    """Word of a query in lower case. ``field`` is a key of :data:`FIELDS`, :data:`LAYER`, or "" for all."""

    text: str
    field: str = ""


@dataclass(frozen=True)
class FoundCase:
    """Newest matching result of a case."""

    case: sqlite3.Row
    session: IndexedSession
    layer: str  # first wrong layer that explains the failure, or ""
    results: int  # number of matching results


@dataclass(frozen=True)
class FoundCases:
    """Page of cases, best match first."""

    cases: Sequence[FoundCase]
    total: int = 0
    pages: int = 1
    is_cut: bool = False  # True if there are more than MAX_RESULTS results


@dataclass(frozen=True)
class _Match:
    """Newest result of a case on a board."""

    session: int
    name: int
    results: int


def parse_words(text: str) -> list[SearchWord]:
    """Parse a query. Raises InvalidParameter for an unknown field or too many words."""
    words = text.lower().split()
    if len(words) > MAX_WORDS:
        raise InvalidParameter(f"the search has {len(words)} words: at most {MAX_WORDS} are allowed")
    return [_parse_word(one) for one in words]


def _parse_word(word: str) -> SearchWord:
    field, separator, rest = word.partition(":")
    # A colon is also part of names and messages, such as `y:0` and `std::bad_alloc`.
    if _FIELD.match(word) and field not in (*FIELDS, LAYER):
        known = (*FIELDS, LAYER)
        hint = (
            f"{did_you_mean(field, known)}{format_expected(known)}; for the text itself, replace the colon by a space"
        )
        raise InvalidParameter(f"unknown field {field[:40]!r} in the search", hint=hint)
    return SearchWord(rest, field) if separator and rest and field in (*FIELDS, LAYER) else SearchWord(word)


def search_cases(database: sqlite3.Connection, asked: SearchQuery, rows: int = ROWS) -> FoundCases:
    """Return a page of the cases that contain every word. Raises InvalidParameter for an invalid query.

    Only the newest :data:`MAX_RESULTS` results are ranked. A case on a board appears once, with its newest result.
    """
    words = parse_words(asked.q)
    if not words:
        return FoundCases(())
    layers = find_wrong_layers(database)
    matches, is_cut = _read_matches(database, words, layers)
    first, pages = choose_page(asked.page, len(matches), rows)
    shown = matches[first : first + rows]
    keys = json.dumps(sorted({one.session for one in shown}))
    chosen = list_sessions_where(database, "key in (select value from json_each(?))", (keys,))
    sessions = {one.key: one for one in chosen}
    found = []
    for one in shown:
        row = database.execute(f"{SELECT_CASES} where session = ? and name = ?", (one.session, one.name)).fetchone()
        session = sessions[one.session]
        found.append(FoundCase(row, session, _explain(row, session, layers), one.results))
    return FoundCases(found, len(matches), pages, is_cut)


def _read_matches(
    database: sqlite3.Connection, words: Sequence[SearchWord], layers: Mapping[str, Sequence[BisectedLayer]]
) -> tuple[list[_Match], bool]:
    """Return the matching cases, best first, and True if there are more results than :data:`MAX_RESULTS`."""
    tables, conditions, values = [], [], list[str]()
    for number, word in enumerate(words):
        tables.append(f"t{number}(key) as materialized ({_select_words(word)})")
        values.append(_quote_trigram(word.text) if len(word.text) >= _TRIGRAM else word.text)
        columns = [FIELDS[word.field]] if word.field in FIELDS else [] if word.field == LAYER else [*_SCORES]
        parts = [f"cases.{column} in t{number}" for column in columns]
        if word.field in ("", LAYER):
            tables.append(f"l{number}(model, op) as materialized ({_LAYERS})")
            values.append(json.dumps(_list_explained(word, layers)))
            parts.append(f"((cases.model, cases.op) in l{number} and outcome not in passing)")
        conditions.append(f"({' or '.join(parts)})")
    # Read the cases of the newest sessions first, so that common words end the search early.
    query = (
        f"with passing(key) as materialized ({_PASSING}), {', '.join(tables)}"
        " select session, name, board, model, outcome, outcome not in passing as fails"
        f" from sessions cross join cases on session = sessions.key where {' and '.join(conditions)}"
        " order by sessions.created desc limit ?"
    )
    found = database.execute(query, (*values, MAX_RESULTS + 1)).fetchall()
    is_cut = len(found) > MAX_RESULTS
    found = found[:MAX_RESULTS]
    texts = _read_texts(database, {key for row in found for key in row[1:5]})
    counts = Counter((row["name"], row["board"], row["model"]) for row in found)
    newest: dict[tuple[int, int, int], tuple[int, sqlite3.Row]] = {}
    for place, row in enumerate(found):
        newest.setdefault((row["name"], row["board"], row["model"]), (place, row))
    names = {model: " ".join(one.name for one in several).lower() for model, several in layers.items()}
    ranked = []
    for key, (place, row) in newest.items():
        score = sum(_score_word(word, row, texts, names) for word in words)
        ranked.append(((-score, not row["fails"], place), _Match(row["session"], row["name"], counts[key])))
    return [match for _, match in sorted(ranked, key=lambda one: one[0])], is_cut


def _list_explained(word: SearchWord, layers: Mapping[str, Sequence[BisectedLayer]]) -> list[tuple[str, str]]:
    """Return the models and operators of the cases whose first wrong layer contains a word. "" is a whole model."""
    named = [(model, one.op) for model, found in layers.items() for one in found if word.text in one.name.lower()]
    return [*named, *((model, "") for model, _ in named)]


def _select_words(word: SearchWord) -> str:
    if len(word.text) >= _TRIGRAM:
        return "select rowid from word_texts where word_texts match ?"
    return "select key from words where instr(lower(word), ?)"


def _quote_trigram(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _read_texts(database: sqlite3.Connection, keys: set[int]) -> dict[int, str]:
    query = "select key, word from words where key in (select value from json_each(?))"
    return {key: text for key, text in database.execute(query, (json.dumps(sorted(keys)),))}


def _score_word(word: SearchWord, row: sqlite3.Row, texts: Mapping[int, str], layers: Mapping[str, str]) -> int:
    """Return the score of the best column that contains a word. Without one, the message or the layer contains it."""
    name = texts[row["name"]].lower()
    if word.field in ("", "case") and word.text in name:
        if name == word.text:
            return _WHOLE_SCORE
        return _START_SCORE if name.startswith(word.text) else _SCORES["name"]
    found = [_SCORES[column] for column in ("model", "board", "outcome") if word.text in texts[row[column]].lower()]
    if not found and word.text in layers.get(texts[row["model"]], ""):
        return _LAYER_SCORE
    return max(found, default=_SCORES["message"])


def _explain(row: sqlite3.Row, session: IndexedSession, layers: Mapping[str, Sequence[BisectedLayer]]) -> str:
    """Return the first wrong layer of the model by bisection, if it explains the failure."""
    return next(
        (
            one.name
            for one in layers.get(row["model"], ())
            if one.explains(row["op"], row["ended"] or row["outcome"], session.created or 0.0)
        ),
        "",
    )
