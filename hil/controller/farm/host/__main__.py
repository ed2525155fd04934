"""`python -m hil.controller.farm.host ...`: the same as `hil farm host ...`."""

from __future__ import annotations

import sys

from hil.controller.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["farm", "host"]
    main.main()
