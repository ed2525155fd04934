"""`python -m hil.controller.farm.gateway`: as `hil farm gateway`."""

import sys

from hil.controller.cli.main import main

sys.argv[1:1] = ["farm", "gateway"]
main()
