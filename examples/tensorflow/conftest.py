"""Where TensorFlow is missing these tests are skipped, and say so."""

import importlib.util

import pytest


class Missing(pytest.File):
    """A file of tests that cannot even be imported here."""

    def collect(self):
        pytest.skip("needs TensorFlow: pip install 'hil[tensorflow]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    found = importlib.util.find_spec("tensorflow")
    # This folder has the same name: it is a package too, one without a file, where the folder above is on the path.
    if found is None or found.origin is None:
        return Missing.from_parent(parent, path=module_path)
    return None
