"""List the environment variables of hil, with their meaning. Each variable is read in the module that needs it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from hil.errors import UsageError, did_you_mean, format_expected

# ``read``: hil reads the variable; ``set``: hil sets the variable for commands that it starts.
Use = Literal["read", "set"]
_MAX_DIGITS = 9


@dataclass(frozen=True)
class Variable:
    """An environment variable."""

    name: str
    meaning: str
    default: str = ""  # value without the variable; "" for none
    unset: str = ""  # effect without the variable, for people; "" if the default explains itself
    example: str = ""
    is_secret: bool = False  # True if `hil config show` must not print the value
    use: Use = "read"
    values: tuple[str, ...] = ()  # accepted values; empty for any text
    is_number: bool = False  # True if the value must be a whole number from 0


VARIABLES = (
    Variable(
        "HIL_BOARD",
        "Board of commands without `--board`; overrides `hil.toml`. hil sets it for the commands of `hil farm lease` "
        "and of farm jobs (a config file), and for the commands of `hil gate --over driver`.",
        example="pi5",
    ),
    Variable("HIL_BOARDS", "Directory with board configs.", example="/srv/boards"),
    Variable("HIL_LABELS", "Labels of stored results, separated by `,`; added to `--label`.", example="nightly,arm"),
    Variable(
        "HIL_CACHE_DIR",
        "Directory of the cache.",
        unset="`hil` in the user's cache directory",
        example="/var/cache/hil",
    ),
    Variable(
        "HIL_SANDBOX",
        "Sandbox of simulated programs: `required` fails without a sandbox, `off` disables it, `auto` uses it if the "
        "system supports it.",
        "auto",
        example="required",
        values=("auto", "required", "off"),
    ),
    Variable(
        "HIL_SIMULATOR",
        "`fresh` starts a new simulator for each command.",
        "reuse",
        example="fresh",
        values=("reuse", "fresh"),
    ),
    Variable(
        "HIL_PICTURES",
        "Number of failing cases of a suite whose outputs the report draws.",
        "20",
        example="5",
        is_number=True,
    ),
    Variable("HIL_SSH_PASSWORD", "Password for SSH.", is_secret=True),
    Variable("HIL_AGENT_TOKEN", "Token of an agent that listens on a port.", is_secret=True),
    Variable(
        "HIL_WEB_URL", "Server of `hil web`, for links from reports to stored results.", example="https://hil.lab"
    ),
    Variable("HIL_WEB_TOKEN", "Token of a `hil web` server, for `hil web` and `hil publish`.", is_secret=True),
    Variable("HIL_NOTIFY_URL", "URL of the webhook of `hil notify`.", is_secret=True),
    Variable("HIL_NOTIFY_SECRET", "Key that signs the messages of `hil notify`.", is_secret=True),
    Variable("HIL_FARM_ISSUER", "Login provider of `hil farm login`.", example="https://login.lab"),
    Variable("HIL_FARM_CLIENT_ID", "Client of the farm at the login provider.", example="hil"),
    Variable("HIL_FARM", "Address of the farm's gateway.", unset="the farm on this machine", example="farm.lab:7070"),
    Variable("HIL_FARM_TOKEN", "Token for the farm.", is_secret=True),
    Variable("HIL_FARM_CA", "Certificate authority (PEM) of the farm's gateway.", example="/etc/hil/ca.pem"),
    Variable(
        "HIL_FARM_HOME", "Directory of a farm.", unset="`hil/farm` in the user's data directory", example="/srv/farm"
    ),
    Variable(
        "HIL_FARM_DB",
        "PostgreSQL URL of a farm.",
        unset="a database in the farm's directory",
        example="postgresql://db.lab/hil",
    ),
    Variable(
        "HIL_FARM_ARTIFACTS",
        "Storage of a farm's files: a directory or `s3://BUCKET/PREFIX`.",
        unset="`artifacts` in the farm's directory",
        example="s3://hil/farm",
    ),
    Variable("HIL_BOARD_NAME", "Farm jobs: name of the board.", use="set"),
    Variable("HIL_BOARD_NAMES", "Farm jobs and leases: names of all boards in order, separated by spaces.", use="set"),
    Variable("HIL_BOARD_ADDRESS", "Farm jobs: address of the board.", use="set"),
    Variable("HIL_FARM_JOB", "Farm jobs: ID of the job.", use="set"),
    Variable("HIL_FARM_USER", "Farm jobs: user who submitted the job.", use="set"),
    Variable("HIL_FARM_ATTEMPT", "Farm jobs: number of the attempt, from 1.", use="set"),
    Variable("HIL_COMMIT", "`hil gate`: commit of the worktree, for the commands that prepare it.", use="set"),
    Variable("HIL_COMPILER", "`hil gate --over compiler`: version, for the command that installs it.", use="set"),
    Variable("HIL_DRIVER", "`hil gate --over driver`: version, for the command that installs it.", use="set"),
    Variable("HIL_ASKPASS_SOCKET", "Socket for questions of ssh; internal.", use="set"),
)


def read_choice(name: str) -> str:
    """Return the value of a variable with a list of values, or its default. Raises UsageError for other values."""
    variable = _find_variable(name)
    value = os.environ.get(name) or variable.default
    if value not in variable.values:
        raise UsageError(
            f"invalid {name}={value!r}",
            hint=f"{did_you_mean(value.lower(), variable.values)}{format_expected(variable.values)}",
        )
    return value


def read_count(name: str) -> int:
    """Return the value of a variable with a whole number, or its default. Raises UsageError for other values."""
    value = os.environ.get(name) or _find_variable(name).default
    if not (value.isascii() and value.isdecimal()) or len(value) > _MAX_DIGITS:
        raise UsageError(f"invalid {name}={value!r}", hint="expected a whole number, such as 5")
    return int(value)


def check_variables() -> None:
    """Raise UsageError if a variable with a list of values, or with a number, has another value."""
    for one in VARIABLES:
        if one.values:
            read_choice(one.name)
        elif one.is_number:
            read_count(one.name)


def _find_variable(name: str) -> Variable:
    return next(one for one in VARIABLES if one.name == name)
