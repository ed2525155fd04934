"""Development tools for hil: virtual boards, and checks of hil against other tools.

This package is not part of wheels. The scripts add the repository's root to PYTHONPATH.
"""
