"""Development tools for hil: virtual boards, and comparisons of hil with other tools.

This package is not part of wheels. The scripts add the repository's root to PYTHONPATH.
"""
