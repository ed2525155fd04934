"""Bundles that try to do harm, or that two readers could judge differently."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hil.bundles.layout import encode_canonical_json
from support.bundle_files import bundle, case, forged

Change = Callable[[dict[str, Any]], Any]


def _case(document: dict[str, Any]) -> dict[str, Any]:
    return document["methods"][0]["cases"][0]


def _text(old: str, new: str) -> Change:
    """Change the manifest's text, so that it is not canonical JSON."""

    def change(document: dict[str, Any]) -> bytes:
        text = encode_canonical_json(document)
        assert old.encode() in text
        return text.replace(old.encode(), new.encode(), 1)

    return change


def _rename(document: dict[str, Any], kind: str, name: str) -> None:
    document["methods"][0][kind][0]["name"] = name
    for one in document["methods"][0]["cases"]:
        one[kind][0]["name"] = name


def _files(*names: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        files = document["program"]["files"]
        files[:] = [{**files[0]}, *({"name": name, "blob": files[1]["blob"]} for name in names)]

    return change


def _nested(levels: int) -> Any:
    return {"a": _nested(levels - 1)} if levels else 1


def _made(value: Any) -> Change:
    return lambda document: document["made"].update(a=value)


def _noise(value: Any) -> Change:
    return lambda document: _case(document).update(noise=value)


def _repeat(document: dict[str, Any], count: int) -> None:
    first = _case(document)
    document["methods"][0]["cases"] = [{**copy.deepcopy(first), "name": f"c{number}"} for number in range(count)]


REFUSED: dict[str, Change] = {
    # texts that pages show
    "a case's name changes the direction of text": lambda d: _case(d).update(name="a\u202egpj.exe"),
    "a case's name has a character that nobody sees": lambda d: _case(d).update(name="a\u200bb"),
    "a method's name ends a line": lambda d: d["methods"][0].update(name="f\u2028"),
    "an input's name is a language tag": lambda d: _rename(d, "inputs", "x\U000e0041"),
    "an output's name is no character": lambda d: _rename(d, "outputs", "y\uffff"),
    "a dimension's name has no width": lambda d: d["methods"][0]["inputs"][0].update(shape=["\u2066N", 2]),
    "a source controls a terminal": lambda d: _case(d).update(source="\u009b31m"),
    "a compiler controls a terminal": lambda d: d["program"].update(compiler="\x1b]0;owned\x07"),
    "a flag changes the direction of text": lambda d: d["program"].update(flags=["--a\u202e"]),
    "a flag is no text": lambda d: d["program"].update(flags=[1]),
    "a name of 256 characters": lambda d: _case(d).update(name="x" * 256),
    "a source of 65537 characters": lambda d: _case(d).update(source="x" * 65537),
    "a runtime with a path": lambda d: d["program"].update(runtime="../iree"),
    "a name with half a character": lambda d: _case(d).update(name="\ud800"),
    "a record with half a character": _made("\ud800"),
    # names that are equal after normalisation
    "two cases of one name": lambda d: d["methods"][0]["cases"][1].update(name=_case(d)["name"]),
    "two methods of one name": lambda d: d["methods"].append(copy.deepcopy(d["methods"][0])),
    "two inputs of one name": lambda d: d["methods"][0]["inputs"].append(d["methods"][0]["inputs"][0]),
    "a case has an input twice": lambda d: _case(d)["inputs"].append(_case(d)["inputs"][0]),
    "two files of one name": _files("weights/w.bin", "weights/w.bin"),
    "two files that differ in case": _files("weights/w.bin", "Weights/W.bin"),
    "a file that is a folder": _files("weights", "weights/w.bin"),
    "a file that is a folder in other letters": _files("WEIGHTS", "weights/w.bin"),
    "a file above the folder": _files("weights/w.bin", "a/../../b"),
    "a key twice": _text('"made":{}', '"made":{"a":1,"a":1}'),
    "keys out of order": _text('"made":{}', '"made":{"b":1,"a":1}'),
    # canonical JSON
    "a letter escaped": _text('"compiler":"nobody 1"', '"compiler":"\\u006eobody 1"'),
    "a newline escaped by number": _text('"made":{}', '"made":{"a":"\\u000a"}'),
    "a solidus escaped": _text("weights/w.bin", "weights\\/w.bin"),
    "a float with zeros behind it": _text('"made":{}', '"made":{"a":1.50}'),
    "a float with an exponent": _text('"made":{}', '"made":{"a":1e5}'),
    "a float that is too large": _text('"made":{}', '"made":{"a":1e999}'),
    "a float with digits that say nothing": _text('"made":{}', '"made":{"a":0.30000000000000005}'),
    "an integer with a zero before it": _text('"made":{}', '"made":{"a":01}'),
    "a negative zero": _text('"made":{}', '"made":{"a":-0}'),
    "an integer of 5000 digits": _text('"made":{}', f'"made":{{"a":{"9" * 5000}}}'),
    "no number": _text('"made":{}', '"made":{"a":1-2}'),
    "a word that JSON lacks": _text('"made":{}', '"made":{"a":undefined}'),
    "white space": _text('"made":{}', '"made": {}'),
    "a record that is too deep": _made(_nested(16)),
    # numbers
    "a tolerance that is an integer": lambda d: _case(d).update(rtol=0),
    "a tolerance that is a negative integer": lambda d: _case(d).update(rtol=-1),
    "a tolerance that is true": lambda d: _case(d).update(rtol=True),
    "a negative tolerance": lambda d: _case(d).update(atol=-0.5),
    "a relative tolerance of all": lambda d: _case(d).update(rtol=1.0),
    "a shape of more elements than any": lambda d: d["methods"][0]["inputs"][0].update(shape=["N", 1 << 40, 1 << 20]),
    "33 dimensions": lambda d: d["methods"][0]["inputs"][0].update(shape=["N"] * 33),
    "a size that is a float": lambda d: _case(d)["inputs"][0].update(shape=[3.0, 2]),
    # cases
    "noise of nothing": _noise([]),
    "noise of an earlier hil": _noise({}),
    "noise of what is no output": lambda d: _case(d).update(noise=[_case(d)["inputs"][0]]),
    "an unknown relation": lambda d: _case(d).update(relation="a friend"),
    "a dimension of two sizes": lambda d: (
        d["methods"][0]["outputs"][0].update(shape=["N"]) or d["methods"][0]["inputs"][0].update(shape=["M", "N"])
    ),
    "a case without outputs": lambda d: d["methods"][0].update(outputs=[]) or [c.update(outputs=[]) for c in _cases(d)],
    "texts that are cut off": lambda d: (
        d["methods"][0]["inputs"][0].update(dtype="string", shape=[1])
        or [c["inputs"][0].update(dtype="string", shape=[1]) for c in _cases(d)]
    ),
    "a blob that nobody names": lambda d: d["methods"][0].update(cases=d["methods"][0]["cases"][:1]),
}


def _cases(document: dict[str, Any]) -> list[dict[str, Any]]:
    return document["methods"][0]["cases"]


READ: dict[str, Change] = {
    "nothing changed": lambda d: None,
    "names of all writing": lambda d: _case(d).update(name="näme \U0001f600 عربي 日本語", source="\u0391\u0301"),
    "a character that is not assigned": lambda d: _case(d).update(name="\u0378"),
    "a name of 255 wide characters": lambda d: _case(d).update(name="\U0001f600" * 255),
    "file names that are alike": _files("weights/w.bin", "weights/w.bin2", "Ä/a", "ä/a"),
    "a record of all that JSON knows": _made([None, True, 0, -1, "\n\u007f\u0000"]),
    "a record of floats": _made([0.1, -2.5e-07, 1e16, 1e-05, 5e-324, 1.5e300, -0.0, 100000.0, 0.0001]),
    "a record as deep as may be": _made(_nested(15)),
    "many digits": _made([int("9" * 4300), 0.30000000000000004, 123456789012345.6, 2.0**-44, 2.0**70]),
    "tolerances": lambda d: _case(d).update(rtol=0.001, atol=1e-05),
    "a relation": lambda d: _case(d).update(relation="same library"),
    "the longest texts": lambda d: _case(d).update(source="x" * 65536),
    "a symbol in several places": lambda d: d["methods"][0]["inputs"][0].update(shape=["N", None]),
    "a thousand cases": lambda d: [_repeat_all(d, 1000)],
}


def _repeat_all(document: dict[str, Any], count: int) -> None:
    own = copy.deepcopy(_cases(document))
    _repeat(document, count)
    document["methods"][0]["cases"] += own


def with_symbols(tensors: int) -> bytes:
    """Return a bundle whose only case has this number of inputs. Each input has 32 dimensions with different names."""

    def change(document: dict[str, Any]) -> None:
        method = document["methods"][0]
        del method["cases"][1:]
        one = _case(document)
        (blob,) = [item for item in document["blobs"] if item["digest"] == one["inputs"][0]["blob"]]
        names = [f"{'n' * 100}{place}" for place in range(tensors)]
        method["inputs"] = [
            {"name": name, "dtype": "uint8", "shape": [*(f"{name}.{axis}" for axis in range(31)), None]}
            for name in names
        ]
        shape = [1] * 31 + [blob["size"]]
        one["inputs"] = [
            {"name": name, "dtype": "uint8", "shape": shape, "blob": blob["digest"]} for name in reversed(names)
        ]

    return _forged(change, cases=1)


def _forged(change: Change, cases: int = 2) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        given = (case(), case(1, rtol=0.5))[:cases]
        return forged(bundle(Path(folder), *given), change)


@functools.cache
def made() -> dict[str, bytes]:
    """Return all bundles by name. Readers accept the bundles in READ, and refuse the others."""
    return {name: _forged(change) for name, change in (REFUSED | READ).items()}
