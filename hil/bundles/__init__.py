"""Bundles: a program and the test cases in a single ``.hilb`` file, which a board can use to test itself.

>>> from hil.bundles import Bundle, MethodTestCase, MethodTestSuite
>>> case = MethodTestCase(inputs=[x], expected_outputs=[y], rtol=1e-5)       # doctest: +SKIP
>>> bundle = Bundle.create(artifact, [MethodTestSuite("main", [case])])      # doctest: +SKIP
>>> bundle.save(Path("model.hilb"))                                          # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hil.bundles.bundle import Bundle as Bundle
    from hil.bundles.cases import BundleProgram as BundleProgram
    from hil.bundles.cases import Method as Method
    from hil.bundles.cases import MethodTestCase as MethodTestCase
    from hil.bundles.cases import MethodTestSuite as MethodTestSuite
    from hil.bundles.cases import Signature as Signature

__all__ = ["Bundle", "BundleProgram", "Method", "MethodTestCase", "MethodTestSuite", "Signature"]


def __getattr__(name: str) -> Any:
    # Import on first use: an agent needs parts of this package, but needs bundles only when it receives one.
    if name not in __all__:
        raise AttributeError(f"module 'hil.bundles' has no attribute {name!r}")
    from hil.bundles import bundle

    return getattr(bundle, name)
