"""Answer prompts of a connecting ``ssh``: secrets, host keys and notices.

The program :mod:`hil.controller.devices.ssh.askpass` forwards the prompts over a socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import sys
from pathlib import Path

from hil.controller.devices.ssh import askpass
from hil.controller.storage.screen import prompts

PASSWORD_VARIABLE = "HIL_SSH_PASSWORD"
_QUESTION_SECONDS = 10.0
_MAX_PROMPT_BYTES = 1 << 16
# Secrets that worked (prompt -> secret), so that a reconnect does not prompt a second time.
_worked: dict[str, str] = {}


class Questions:
    """Prompts of one login, answered in the thread that waits for the login.

    Args:
        host_key: Fingerprint that answers the question for the board's host key; "" to ask the user.

    Attributes:
        environment: Environment variables that make ssh forward its prompts.
        can_answer: Whether a terminal, a password, or the user's SSH_ASKPASS is available.
        declined: Required prompt that got no answer; "" for none.
    """

    def __init__(self, folder: Path, *, host_key: str = "") -> None:
        self._host_key = host_key
        self.declined = ""
        self._password = os.environ.get(PASSWORD_VARIABLE, "")
        self._typed: dict[str, str] = {}
        self._notices: list[socket.socket] = []
        has_own = os.environ.get("SSH_ASKPASS_REQUIRE") in ("force", "prefer") and bool(os.environ.get("SSH_ASKPASS"))
        self.is_interactive = prompts.can_ask()
        self.can_answer = has_own or self.is_interactive or bool(self._password)
        program, place = folder / "askpass", folder / "askpass.sock"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(place))
        self.listener.listen()
        self.environment = {"HIL_ASKPASS_SOCKET": str(place)}
        if not has_own:
            command = shlex.join([sys.executable, "-I", "-S", "-B", askpass.__file__])
            program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            program.chmod(0o700)
            # Before OpenSSH 8.4, ssh without a terminal calls this program only if DISPLAY is set.
            display = os.environ.get("DISPLAY") or ":0"
            self.environment |= {"SSH_ASKPASS": str(program), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": display}

    def answer_one(self, board_ssh: int) -> None:
        """Accept a prompt from the listener and answer it.

        Args:
            board_ssh: PID of the ssh that logs in to the board. Other processes log in to jump hosts, which do not get
                the board's password.

        Raises:
            KeyboardInterrupt: The user pressed Ctrl-C at the prompt.
        """
        link = self.listener.accept()[0]
        link.settimeout(_QUESTION_SECONDS)
        with contextlib.ExitStack() as kept:
            kept.callback(link.close)
            try:
                question = json.loads(link.makefile("rb").readline(_MAX_PROMPT_BYTES))
                prompt, kind, ssh = str(question["prompt"]), question["kind"], question["ssh"]
            except (OSError, ValueError, KeyError, TypeError):
                return
            if kind == "none":
                prompts.notify(prompt)
                self._notices.append(link)
                kept.pop_all()
                return
            answer = self._confirm(prompt) if kind == "confirm" else self._answer_prompt(prompt, ssh == board_ssh)
            with contextlib.suppress(OSError):
                link.sendall(json.dumps(answer).encode() + b"\n")

    def remember(self) -> None:
        """Cache the secrets of a successful login, except one-time codes."""
        for prompt, secret in self._typed.items():
            if _is_passphrase(prompt) or prompt.lower().rstrip().endswith("password:"):
                _worked[prompt] = secret

    def close(self) -> None:
        """Stop answering prompts."""
        for one in (self.listener, *self._notices):
            one.close()

    def _answer_prompt(self, prompt: str, is_of_board: bool) -> str | None:
        is_repeated = prompt.startswith("Please type 'yes'")
        if is_repeated or "(yes/no" in prompt:
            if self._host_key and is_of_board:
                # ssh repeats the question if the fingerprint is not that of the host key.
                return "no" if is_repeated else self._host_key
            return prompts.ask(prompt, echo=True) or "no"
        if self._password and is_of_board and not _is_passphrase(prompt):
            password, self._password = self._password, ""
            return password
        # A repeated prompt means that the cached secret is wrong.
        secret = _worked.pop(prompt, "") or prompts.ask(prompt)
        if secret:
            self._typed[prompt] = secret
            return secret
        if not _is_passphrase(prompt):
            self.declined = prompt.strip().rstrip(":")
        return None

    def _confirm(self, prompt: str) -> str | None:
        answer = prompts.ask(f"{prompt.rstrip()} (yes/no) ", echo=True)
        return "" if answer.lower() in ("y", "yes") else None


def _is_passphrase(prompt: str) -> bool:
    return prompt.startswith(("Enter passphrase", "Enter PIN"))
