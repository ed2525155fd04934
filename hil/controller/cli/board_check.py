"""`hil board check`, `ping` and `info`: what a board is and has."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import click

from hil.controller.cli.options import board_options, chosen_board, json_option, place_argument
from hil.errors import EXIT_BOARD, EXIT_OK
