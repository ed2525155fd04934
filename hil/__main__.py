"""Run the command `hil` as `python -m hil`, for environments whose `bin` directory is not on PATH."""

from hil.controller.cli.main import main

if __name__ == "__main__":
    main()
