"""What working on hil takes and using it does not: virtual boards, and checks of hil against other tools.

No wheel has it: whoever imports it has the folder above on the path, which the scripts add to PYTHONPATH.
"""
