"""What errors of other people's code say, in a line."""

from __future__ import annotations

import re

# What importing torchvision or torchaudio says beside a torch that it was not built for; no error of its own tells it.
_OTHER_TORCH = re.compile(r"operator (torchvision|torchaudio)::\w+ does not exist")


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line that says something, cut to ``most`` characters; the error's kind where none does."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line[:most] for line in lines if line), type(error).__name__)


def import_hint(error: Exception) -> str:
    """What to do about a package that cannot be imported; "" where nothing is known."""
    if found := _OTHER_TORCH.search(str(error)):
        return (
            f"the {found[1]} here was built for another torch than the one beside it (PyPI's is for CUDA): "
            "install both from the index of CPU builds that PyTorch's installation page names"
        )
    return f"pip install {error.name.partition('.')[0]}" if isinstance(error, ImportError) and error.name else ""
