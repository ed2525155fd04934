"""Models and data that hil contains, for the examples in help texts: ``example:digits_cnn``."""

from __future__ import annotations

from pathlib import Path

from hil.errors import UsageError, did_you_mean

PREFIX = "example:"
FILES = {
    "digits_cnn": "digits_cnn.onnx",
    "digits_cnn_batch": "digits_cnn_batch.onnx",
    "digits_cnn_int8": "digits_cnn_int8.onnx",
    "digits_test": "digits_test.npz",
}
_HERE = Path(__file__).resolve().parents[1]
# In a wheel, and in a checkout.
_FOLDERS = (_HERE / "controller" / "workloads" / "suites" / "zoo" / "digits", _HERE.parent / "examples" / "digits")


def find_examples_folder() -> Path:
    """Return the directory with the files of the examples."""
    return next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[0])


def locate_example(text: str) -> str:
    """Return the path of ``example:NAME``. Other texts, and names of existing files, are returned unchanged.

    Raises:
        UsageError: the example does not exist.
    """
    if not text.startswith(PREFIX) or Path(text).exists():
        return text
    name = text.removeprefix(PREFIX)
    if name not in FILES:
        names = [f"{PREFIX}{one}" for one in FILES]
        raise UsageError(f"unknown example {text!r}", hint=f"{did_you_mean(text, names)}examples: {', '.join(names)}")
    return str(find_examples_folder() / FILES[name])
