"""Completion in bash, zsh and fish. The scripts pass the command up to the cursor in ``COMP_LINE``.

Click's scripts pass the words instead. In bash, they cannot complete words with ``:`` and ``=``, such as ``ssh:rpi5``
and ``--board=rpi5``. In zsh and fish, they lose the start of the word ``--board=rpi5``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    split_arg_string,
)

from hil.errors import UsageError

_LINE, _WORDS, _CURRENT, _BREAKS = "COMP_LINE", "COMP_WORDS", "COMP_CWORD", "COMP_WORDBREAKS"
_SPACES, _QUOTES = " \t\n", "\"'"
_BASH = """\
%(complete_func)s() {
    local kind value
    COMPREPLY=()
    while IFS=',' read -r kind value; do
        case $kind in
            plain)
                COMPREPLY+=("$value")
                # More text follows, such as a value after KEY=.
                [[ $value == *[=:,] ]] && compopt -o nospace 2>/dev/null ;;
            dir) compopt -o dirnames 2>/dev/null ;;
            file) compopt -o default 2>/dev/null ;;
        esac
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \
%(complete_var)s=bash_complete "$1" 2>/dev/null)
}

# bash < 4.4 does not have nosort.
complete -o nosort -F %(complete_func)s %(prog_name)s 2>/dev/null || complete -F %(complete_func)s %(prog_name)s
"""
_ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local program=${(Q)words[1]} kind value text
    local -a values open described response
    local -i files=0 folders=0
    (( $+commands[$program] )) || [[ -x $program ]] || return 1
    response=("${(@f)$(COMP_LINE="${words[1,CURRENT-1]} $PREFIX" %(complete_var)s=zsh_complete $program 2>/dev/null)}")
    for kind value text in "${response[@]}"; do
        case $kind in
            plain)
                if [[ $value == *[=:,] ]]; then
                    open+=("$value")  # more text follows, such as a value after KEY=
                elif [[ $text == "_" ]]; then
                    values+=("$value")
                else
                    described+=("$value:$text")
                fi ;;
            dir) folders=1 ;;
            file) files=1 ;;
        esac
    done
    (( $#described )) && _describe -V unsorted described -U
    (( $#values )) && compadd -U -V unsorted -a values
    (( $#open )) && compadd -U -V unsorted -S '' -a open
    if (( files || folders )); then
        # Complete the file in --option=FILE and in NAME=FILE.
        [[ $PREFIX == *=* ]] && compset -P '*='
        if (( files )); then _path_files -f; else _path_files -/; fi
    fi
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""
_FISH = """\
function %(complete_func)s
    set -l words (commandline -opc)
    set -l token (commandline -ct)
    # Complete the file in --option=FILE and in NAME=FILE.
    set -l start (string match -r '^.*=' -- $token)
    set -l file (string replace -r '^.*=' '' -- $token)
    set -l typed (commandline -cp | string collect)
    for line in (env COMP_LINE="$typed" %(complete_var)s=fish_complete $words[1] 2>/dev/null)
        set -l item (string split -m 1 ',' -- $line)
        switch $item[1]
            case plain
                echo $item[2]
            case dir
                for path in (__fish_complete_directories "$file")
                    echo "$start$path"
                end
            case file
                for path in (__fish_complete_path "$file")
                    echo "$start$path"
                end
        end
    end
end

complete --no-files --keep-order --command %(prog_name)s --arguments "(%(complete_func)s)"
"""


def check_words(environment: Mapping[str, str], shell: str) -> None:
    """Raise UsageError unless the variables of a completion script are valid."""
    if _LINE in environment:
        return
    hint = f"hil sets this variable in the script of `hil completion {shell}`"
    for name in (_WORDS, _CURRENT):
        if name not in environment:
            raise UsageError(f"missing environment variable {name}", hint=hint)
    number = environment[_CURRENT]
    if shell != "fish" and not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise UsageError(f"invalid {_CURRENT} {number[:80]!r}: expected the number of a word", hint=hint)


class _LineComplete(ShellComplete):
    """Completion of a word in a command line."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor's word, and this word up to the cursor."""
        if _LINE not in os.environ:
            return super().get_completion_args()
        # With the additional character, the last word is the cursor's word, even if it is empty.
        words = split_arg_string(f"{os.environ[_LINE]}x")
        return words[1:-1], words[-1][:-1] if len(words) > 1 else ""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Return the candidates. In ``--option=VALUE``, they contain the option."""
        option, equals, value = incomplete.partition("=")
        if not equals or not option.startswith("--"):
            return super().get_completions(args, incomplete)
        found = super().get_completions([*args, option], value)
        return [
            CompletionItem(f"{option}={item.value}", help=item.help) if item.type == "plain" else item for item in found
        ]


class _BashLineComplete(_LineComplete, BashComplete):
    """Completion in bash. Bash replaces only the part of the word after the last separator of COMP_WORDBREAKS."""

    source_template = _BASH

    def source(self) -> str:
        """Return the script, which supports older versions of bash than click's script."""
        return ShellComplete.source(self)

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        found = super().get_completions(args, incomplete)
        line = os.environ.get(_LINE, "")
        typed = line[max(map(line.rfind, _SPACES)) + 1 :]
        if typed.startswith(tuple(_QUOTES)):
            return found
        breaks = set(os.environ.get(_BREAKS, "")) - {*_SPACES, *_QUOTES}
        start = max((incomplete.rfind(one) for one in breaks), default=-1) + 1
        return [CompletionItem(item.value[start:], help=item.help) if item.type == "plain" else item for item in found]


class _ZshLineComplete(_LineComplete, ZshComplete):
    """Completion in zsh."""

    source_template = _ZSH


class _FishLineComplete(_LineComplete, FishComplete):
    """Completion in fish."""

    source_template = _FISH


COMPLETERS: dict[str, type[ShellComplete]] = {
    "bash": _BashLineComplete,
    "zsh": _ZshLineComplete,
    "fish": _FishLineComplete,
}
