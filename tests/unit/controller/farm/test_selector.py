"""Test selectors: matching boards, missing labels, and invalid selectors."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hil.controller.farm.selector import TermGroup, find_nearest, parse, suggest_labels
from hil.errors import UsageError

GIB = 1 << 30
A53 = {
    "name": "rpi-3",
    "chip": "a53",
    "arch": "aarch64",
    "mem": 2 * GIB,
    "cores": 4,
    "kernel": "6.10.0-23-arm64",
    "runtimes": ["iree", "onnxruntime"],
    "gpu": False,
    "npu": True,
    "display": "",
    "clock": 1.5,
    "disk": "16 GB",
    "vendor name": "R & Co",
}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("  ", True),
        ("chip=a53", True),
        ("chip == a53", True),
        ("chip=A53", False),
        ("chip!=a53", False),
        ("chip!=a72", True),
        ("nothing!=a72", True),
        ("nothing=a72", False),
        ("mem>=1GiB", True),
        ("mem>=2GiB", True),
        ("mem>2GiB", False),
        ("mem<=2048MiB", True),
        ("mem<2GB", False),
        ("mem=2gib", True),
        ("mem=2147483648", True),
        ("mem>=3e9", False),
        ("disk>=15.9 GB", None),
        ('disk>="15.9 GB"', True),
        ("disk=16000MB", True),
        ("disk<16GiB", True),
        ("cores=4", True),
        ("cores>=4", True),
        ("cores>4", False),
        ("cores>-4", True),
        ("clock>=1.25", True),
        ("kernel>=6.1", True),
        ("kernel>=6.9", True),
        ("kernel<6.9", False),
        ("kernel>=6.10", True),
        ("kernel<=6.10.0", True),
        ("kernel>6.10", False),
        ("kernel>=v6.2", True),
        ("kernel>=1GiB", False),
        ("chip>=1", False),
        ("gpu>=0", False),
        ("nothing>=1", False),
        ("nothing<1", False),
        ("runtimes=iree", True),
        ("runtimes=tflite", False),
        ("runtimes!=iree", False),
        ("runtimes in (tflite, iree)", True),
        ("runtimes in (tflite)", False),
        ("arch in (aarch64,x86_64)", True),
        ("arch not in (x86_64, riscv64)", True),
        ("arch not in (aarch64)", False),
        ("chip", True),
        ("gpu", False),
        ("!gpu", True),
        ("gpu=false", True),
        ("gpu=no", True),
        ("npu", True),
        ("npu=true", True),
        ("npu=yes", True),
        ("npu=maybe", False),
        ("display", False),
        ("nothing", False),
        ("not nothing", True),
        ("!!npu", True),
        ("chip=a53, npu", True),
        ("chip=a53, gpu", False),
        ("chip=a53 and npu && cores=4", True),
        ("gpu or npu", True),
        ("gpu || nothing", False),
        ("gpu or npu and nothing", False),
        ("(gpu or npu) and nothing", False),
        ("npu or gpu and nothing", True),
        ("(npu or gpu) and nothing", False),
        ("(gpu or npu), chip=a53", True),
        ("!(gpu or npu)", False),
        ("!(gpu, npu)", True),
        ("!(mem>=4GiB)", True),
        ("!chip=a72", True),
        ('"vendor name"="R & Co"', True),
        ("'vendor name' in ('R & Co', x)", True),
        ('chip="a53"', True),
        ("CHIP=a53", False),
        ("chip=a53 AND npu", True),
    ],
)
def test_selector_matches_labels(text: str, matches: bool | None):
    if matches is None:
        with pytest.raises(UsageError):
            parse(text)
        return
    assert parse(text).matches(A53) is matches
    assert bool(parse(text).misses(A53)) is not matches


@pytest.mark.parametrize(
    ("text", "at", "said"),
    [
        ("chip=", 6, "missing value"),
        ("chip= , npu", 7, "missing value"),
        ("=a53", 1, "missing label name"),
        ("chip=a53,", 10, "missing label name"),
        ("chip=a53 or", 12, "missing label name"),
        ("a b", 3, "unexpected text"),
        ("a)", 2, "unexpected text"),
        ("(a", 3, "unclosed parenthesis"),
        ("()", 2, "missing label name"),
        ("a in b", 6, "`in` requires values in parentheses"),
        ("a in ()", 7, "missing value"),
        ("a in (b c)", 9, "unclosed parenthesis"),
        ("a not b", 7, "`in` after `not`"),
        ("a & b", 3, "&& or a comma for `and`"),
        ("a | b", 3, "|| for `or`"),
        ("chip='a53", 6, "unclosed quote"),
        ("chip>=a53", 7, "requires a number or version, got 'a53'"),
        ("mem>=1XB", 6, "unknown unit XB"),
        ("a, b or c", 10, "requires parentheses"),
        ("a or b, c", 10, "requires parentheses"),
        ("a\x00", 2, "invalid character"),
        ("chip=\ud800", 6, "invalid character"),
        ("(" * 100 + "a", 42, "nesting exceeds 40 levels"),
        ("!" * 100 + "a", 42, "nesting exceeds 40 levels"),
    ],
)
def test_parse_rejects_invalid_selector_with_position_and_hint(text: str, at: int, said: str):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert f"character {at}: " in caught.value.message
    assert said in caught.value.message
    assert "chip=a53, mem>=1GiB" in caught.value.hint


def test_parse_rejects_oversized_selector():
    with pytest.raises(UsageError, match="3,000 characters, maximum 2,000"):
        parse("a" * 3000)


@pytest.mark.parametrize(
    ("text", "misses"),
    [
        ("chip=a72", ["chip is a53, not a72"]),
        ("chip=a72, mem>=4GiB, gpu", ["chip is a53, not a72", "mem is 2GiB, not >= 4GiB", "has no gpu"]),
        ("mem>=4294967296", ["mem is 2147483648, not >= 4294967296"]),
        ("!npu", ["has npu"]),
        ("chip!=a53", ["chip is a53"]),
        ("arch in (x86_64, riscv64)", ["arch is aarch64, not x86_64 or riscv64"]),
        ("runtimes=tflite", ["runtimes is iree and onnxruntime, not tflite"]),
        ("gpu=true", ["gpu is false, not true"]),
        ("site=lab", ["has no site"]),
        ("display=hdmi", ["has no display"]),
        ("display!=''", ["display is empty"]),
        ("gpu or chip=a72", ["has no gpu, or chip is a53, not a72"]),
        ("gpu or npu", []),
        ("!(npu, cores=4)", ["has npu, or cores is 4"]),
    ],
)
def test_selector_describes_missing_labels(text: str, misses: list[str]):
    assert parse(text).misses(A53) == misses


def test_nearest_sorts_boards_by_missing_labels():
    boards = {
        "rpi-3": A53,
        "rpi-4": {"chip": "a72", "mem": 8 * GIB},
        "x86": {"chip": "zen", "mem": GIB, "gpu": True},
        "new": {},
    }
    found = find_nearest(parse("chip=a72, mem>=4GiB, gpu"), boards)
    assert [(name, len(misses)) for name, misses in found] == [("rpi-4", 1), ("x86", 2), ("new", 3)]
    assert found[0][1] == ["has no gpu"]
    assert len(find_nearest(parse("gpu"), boards, most=1)) == 1


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("a and(b)&&c", "a, b, c"),
        ("a or (b or c)", "a or b or c"),
        ("a, (b or c)", "a, (b or c)"),
        ("(a, b) or c", "(a, b) or c"),
        ("!(a or !b)", "!a, b"),
        ("!(a=1)", "a!=1"),
        ("!(a>=1)", "!a>=1"),
        ("a = '1 2'", 'a="1 2"'),
        ("'in'=\"or\"", '"in"="or"'),
        (r"a='it\'s'", 'a="it\'s"'),
    ],
)
def test_selector_has_canonical_text(text: str, canonical: str):
    assert str(parse(text)) == canonical
    assert parse(canonical) == parse(text)


NAMES = st.sampled_from(["chip", "mem", "gpu", "in", "or", "my label", 'q"uote', "back\\slash", "a,b", "é", ""])
WORDS = st.sampled_from(["a53", "1", "0", "1GiB", "6.10", "false", "and", "x y", "(", "'", '"', "\\", "", "é=!"])
VALUES = st.one_of(WORDS, st.integers(-3, 3), st.booleans(), st.floats(), st.none(), st.lists(WORDS, max_size=2))
LABELS = st.dictionaries(NAMES, VALUES)


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(
        several.map(lambda parts: "(" + ", ".join(parts) + ")"),
        several.map(lambda parts: "(" + " or ".join(parts) + ")"),
        inner.map(lambda part: f"!({part})"),
    )


TERMS = st.one_of(
    NAMES.map(_quote),
    NAMES.map(lambda name: f"!{_quote(name)}"),
    st.builds(lambda name, op, value: _quote(name) + op + _quote(value), NAMES, st.sampled_from(["=", "!="]), WORDS),
    st.builds(
        lambda name, op, value: _quote(name) + op + value,
        NAMES,
        st.sampled_from([">=", "<=", ">", "<"]),
        st.sampled_from(["1", "1GiB", "6.10", "-2.5e3"]),
    ),
    st.builds(
        lambda name, no, values: f"{_quote(name)} {no}in ({', '.join(map(_quote, values))})",
        NAMES,
        st.sampled_from(["", "not "]),
        st.lists(WORDS, min_size=1, max_size=3),
    ),
)
SELECTORS = st.recursive(TERMS, _nested, max_leaves=6)


@pytest.mark.ci
@given(st.one_of(st.text(), st.text(alphabet="ab1=!<>&|,()'\"\\ \n.", max_size=30)))
@example("\\")
@example("a=9" + "9" * 1900)
@example("a>=" + "9" * 1900 + "e9")
def test_parse_accepts_text_or_raises_usage_error(text: str):
    try:
        selector = parse(text)
    except UsageError:
        return
    for labels in ({}, {"a": 10**400, "b": float("nan")}, {"a": "9" * 5000, "b": [True, None, 1.5, "1GiB"]}):
        assert selector.matches(labels) is not bool(selector.misses(labels))
    assert parse(str(selector)) == selector


@given(SELECTORS, LABELS)
def test_selector_survives_text_round_trip(text: str, labels: dict[str, object]):
    selector = parse(text)
    again = parse(str(selector))
    assert again == selector
    assert str(again) == str(selector)
    assert again.matches(labels) is selector.matches(labels)


@given(SELECTORS, SELECTORS, LABELS)
def test_selector_satisfies_de_morgan_laws(one: str, other: str, labels: dict[str, object]):
    def matches(text: str) -> bool:
        return parse(text).matches(labels)

    assert matches(f"!(({one}), ({other}))") is matches(f"!({one}) or !({other})")
    assert matches(f"!(({one}) or ({other}))") is matches(f"!({one}), !({other})")
    assert matches(f"!!({one})") is matches(one)
    assert matches(f"!({one})") is not matches(one)
    assert matches(f"({one}), ({other})") is (matches(one) and matches(other))
    assert matches(f"({one}) or ({other})") is (matches(one) or matches(other))
    assert (~parse(one)).matches(labels) is not matches(one)


@given(SELECTORS, LABELS)
def test_selector_misses_labels_unless_matching(text: str, labels: dict[str, object]):
    selector = parse(text)
    assert bool(selector.misses(labels)) is not selector.matches(labels)


def test_empty_group_matches_all_boards():
    assert TermGroup().matches({})
    assert not (~TermGroup()).matches({})


def test_selector_matches_large_value_lists_quickly():
    values = [f"v{number}" for number in range(380)]
    selector = parse(f"features in ({','.join(values)})")
    begin = time.process_time()
    assert not selector.matches({"features": [f"feature-{number}" for number in range(20_000)]})
    assert selector.matches({"features": [*(f"feature-{number}" for number in range(20_000)), "v379"]})
    assert time.process_time() - begin < 2


def test_suggestion_is_label_that_a_board_has():
    boards = [{"chip": "a53", "mem": 1 << 30}, {"gpu": True}]
    assert suggest_labels(parse("chp=a53, mem>=1GiB"), boards) == "did you mean 'chip'? "
    assert suggest_labels(parse("!gpuu or chip=a53"), boards) == "did you mean 'gpu'? "
    assert suggest_labels(parse("chip=a5, camera"), boards) == ""
