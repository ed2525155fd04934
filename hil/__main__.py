"""`python -m hil`: the command `hil`, for environments with a `bin` that is not on PATH."""

from hil.controller.cli.main import main

if __name__ == "__main__":
    main()
