"""Bundles: a program with its test cases in one ``.hilb`` file, which a board can check itself against.

>>> from hil.bundles import Bundle, MethodTestCase, MethodTestSuite
>>> case = MethodTestCase(inputs=[x], expected_outputs=[y], rtol=1e-5)       # doctest: +SKIP
>>> bundle = Bundle.create(artifact, [MethodTestSuite("main", [case])])      # doctest: +SKIP
>>> bundle.save(Path("model.hilb"))                                          # doctest: +SKIP
"""

from hil.bundles.bundle import Bundle
from hil.bundles.cases import Method, MethodTestCase, MethodTestSuite, Program, Signature

__all__ = ["Bundle", "Method", "MethodTestCase", "MethodTestSuite", "Program", "Signature"]
