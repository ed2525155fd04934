"""`python -m hil`: the command `hil`, for an environment whose `bin` is not on PATH."""

from hil.controller.cli.main import main

if __name__ == "__main__":
    main()
