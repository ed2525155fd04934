# shellcheck shell=sh
# Actions of hil on a board, as plain sh. hil sends this script on stdin:
#     sh -s -- probe|status|stop|clean|reset_fence|logs FOLDER ...
# The script prints lines with a word and tab-separated values. probe.py parses the lines.
#
# The last line calls the function with the name of the action. The configured directory may begin with a tilde. dash and
# busybox support `test -O`.
# shellcheck disable=SC2329,SC2088,SC3067
umask 077
LC_ALL=C
export LC_ALL
tab='	'
act=$1
folder=$2
shift 2
HOME=${HOME%/}
case $folder in
'') folder=$HOME/.hil ;;
'~/'*) folder=$HOME/${folder#'~/'} ;;
/*) ;;
*) folder=$HOME/$folder ;;
esac
folder=${folder%/}
marker=$folder/hil.txt
ours='agents packages run store'

say() { printf '%s\n' "$*"; }

nap() { sleep 0.2 2>/dev/null || sleep 1; }

# running: return whether the last started agent runs, and set pid and build. A PID that another process has now does
# not count.
running() {
    pid='' build=''
    { read -r pid build <"$folder/run/agent.pid"; } 2>/dev/null || return 1
    line=$({ tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null) || return 1
    case $line in *" unix:$folder/run/agent.sock "*" --build $build "*) return 0 ;; esac
    return 1
}

# installed: find the installed agent, and set has_build, has_recipe, has_runtimes, has_python and has_packages.
installed() {
    has_build='' has_recipe='' has_runtimes='' has_python='' has_packages=''
    { read -r has_build <"$folder/agents/current"; } 2>/dev/null || return 1
    [ -r "$folder/agents/$has_build" ] || return 1
    while IFS=$tab read -r key value; do
        case $key in
        recipe) has_recipe=$value ;;
        runtimes) has_runtimes=$value ;;
        python) has_python=$value ;;
        packages) has_packages=$value ;;
        esac
    done <"$folder/agents/$has_build"
}

# serves: return whether the installed agent matches this recipe and has these runtimes.
serves() {
    [ "$has_recipe" = "$1" ] || return 1
    shift
    for runtime in "$@"; do
        case " $has_runtimes " in *" $runtime "*) ;; *) return 1 ;; esac
    done
}

is_complete() {
    [ -x "$has_python" ] || return 1
    for package in $has_packages; do
        [ -d "$folder/packages/$package" ] || return 1
    done
}

tell_installed() {
    say "installed$tab$has_build$tab$has_recipe$tab$has_runtimes$tab$has_python$tab$has_packages"
}

available() {
    # shellcheck disable=SC2046 # split on purpose
    set -- $(df -Pk "$1" 2>/dev/null | tail -n 1)
    say "${4:-}"
}

look='
import os, struct, sys
problem = ""
machine = os.uname().machine
if struct.calcsize("P") == 4:
    machine = {"aarch64": "armv7l", "armv8l": "armv7l", "x86_64": "i686"}.get(machine, machine)
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION").replace(" ", "-")
except (AttributeError, OSError, ValueError):
    libc = ""
try:
    if not libc:
        import glob, subprocess
        for loader in glob.glob("/lib/ld-musl-*.so.1"):
            said = subprocess.Popen([loader], stderr=subprocess.PIPE).communicate()[1].decode()
            libc = "musl-" + ".".join(said.split("Version ")[1].split()[0].split(".")[:2])
except Exception:
    pass
try:
    import concurrent.futures, ctypes, email, fcntl, hashlib, importlib, json, logging, mmap, select, socket
    import subprocess, tarfile, threading, uuid, zlib
except ImportError as error:
    problem = str(error)
version = "%d.%d" % tuple(sys.version_info)[:2]
if sys.implementation.name != "cpython":
    problem = "it is " + sys.implementation.name + ", not CPython"
print("\t".join(["python", version, machine, libc, os.path.realpath(sys.executable), problem]))
'

# pythons: list every Python 3 in PATH, without duplicates.
pythons() {
    met=' '
    IFS=:
    for place in $PATH /usr/local/bin /usr/bin; do
        for file in "$place"/python3 "$place"/python3.1[0-4]; do
            [ -x "$file" ] || continue
            file=$(readlink -f "$file" 2>/dev/null || say "$file")
            case $met in *" $file "*) continue ;; esac
            met="$met$file "
            answer=$("$file" -I -B -c "$look" </dev/null 2>&1) || {
                say "broken$tab$file$tab$(say "$answer" | tail -n 1)"
                continue
            }
            say "$answer"
        done
    done
    unset IFS
}

# folder_works: return whether hil can use the directory. The directory must be hil's directory, or able to become it.
# Files in it must be writable and executable. A directory without the marker belongs to the user, so hil neither writes
# to it nor removes it.
folder_works() {
    if [ ! -e "$marker" ]; then
        for name in $ours; do
            [ ! -e "$folder/$name" ] || { say "unusable${tab}it contains a $name that does not belong to hil"; return; }
        done
        why=$({ mkdir -p "$folder" && say "hil keeps its agent here; hil board clean removes it." >"$marker"; } 2>&1) || {
            say "unusable$tab$why"
            return
        }
    fi
    why=$(mkdir -p "$folder/run" 2>&1) || { say "unusable$tab$why"; return; }
    trial=$folder/run/trial.$$
    why=$({ printf '#!/bin/sh\nexit 0\n' >"$trial" && chmod 700 "$trial"; } 2>&1) || {
        rm -f "$trial"
        say "unusable$tab$why"
        return
    }
    "$trial" 2>/dev/null || say noexec
    rm -f "$trial"
}

# probe FOLDER RECIPE RUNTIME...: print only what hil needs to find the missing packages.
probe() {
    # Never run files from a directory of another user: they would run with the permissions of this login.
    if [ -e "$folder" ] && [ ! -O "$folder" ]; then
        say "unusable${tab}it belongs to a different user"
        return
    fi
    if installed; then
        if serves "$@" && running && [ "$build" = "$has_build" ] && [ -S "$folder/run/agent.sock" ]; then
            say "up$tab$pid$tab$build$tab$has_python"
            return
        fi
        tell_installed
        if serves "$@" && is_complete; then
            # The disk may have become read-only or noexec since the deploy.
            folder_works
            say complete
            return
        fi
    fi
    folder_works
    for package in "$folder"/packages/*; do
        [ ! -d "$package" ] || say "package$tab${package##*/}"
    done
    say "machine$tab$(uname -m)$tab$(uname -s)"
    say "free$tab$(available "$folder")"
    pythons
}

# status FOLDER: print the state of the installation and of the agent.
status() {
    if running; then say "up$tab$pid$tab$build"; fi
    if installed; then tell_installed; fi
    if [ -d "$folder" ]; then
        # shellcheck disable=SC2046 # split on purpose
        set -- $(du -sk "$folder" 2>/dev/null)
        say "used$tab${1:-}"
        say "free$tab$(available "$folder")"
    fi
}

# end_agent: end the agent. `polite` has no effect while the device is in use.
end_agent() {
    if [ "$1" = force ]; then signals='TERM KILL'; else signals=HUP; fi
    for signal in $signals; do
        turns=0
        while [ "$turns" -lt 30 ]; do
            running || return 0
            [ "$turns" != 0 ] || kill -s "$signal" "$pid" 2>/dev/null
            nap
            turns=$((turns + 1))
        done
    done
    ! running
}

# stop FOLDER polite|force: stop the agent.
stop() {
    if running; then was=$pid; else was=''; fi
    if ! end_agent "$1"; then
        say "busy$tab$pid"
        return 1
    fi
    rm -f "$folder/run/agent.pid" "$folder/run/agent.sock" "$folder/run/agent.sock.data" "$folder/run/agent.sock.grpc"
    if [ -n "$was" ]; then say "stopped$tab$was"; fi
}

# lock: prevent deploys up to the end of this script, if the board has the command for it.
lock() {
    command -v flock >/dev/null 2>&1 && [ -d "$folder/run" ] || return 0
    exec 9>>"$folder/run/deploy.lock" || return 0
    turns=0
    while [ "$turns" -lt 50 ]; do
        flock -n 9 && return
        nap
        turns=$((turns + 1))
    done
    return 1
}

# clean FOLDER polite|force: stop the agent, and remove all of hil's files, also those for use without an agent
# (`command`). Remove the directory if it is then empty.
clean() {
    [ -d "$folder" ] || return 0
    if ! lock && [ "$1" != force ]; then
        say deploying
        return
    fi
    stop "$1" || return 0
    cd "$folder" || return 0
    why=$(rm -rf command/programs command/runs 2>&1) || say "left$tab$folder/command$tab$why"
    rmdir command 2>/dev/null
    if [ -e "$marker" ]; then
        # shellcheck disable=SC2086 # split on purpose
        why=$(rm -rf $ours 2>&1 && rm -f "$marker" 2>&1) || {
            say "left$tab$folder$tab$why"
            return
        }
    fi
    cd / && rmdir "$folder" 2>/dev/null && return
    for file in "$folder"/* "$folder"/.[!.]*; do
        [ ! -e "$file" ] || say "left$tab$file${tab}it does not belong to hil"
    done
}

# reset_fence FOLDER polite|force: stop the agent, and remove the fence counter, so that the next agent starts to count
# again.
reset_fence() {
    [ -e "$marker" ] || return 0
    if ! lock; then
        say deploying
        return
    fi
    stop "$1" || return 0
    why=$(rm -f "$folder/store/fence" 2>&1) || say "left$tab$folder/store/fence$tab$why"
}

# logs FOLDER LINES: print the last lines of the agent's log.
logs() {
    tail -n "$1" "$folder/run/agent.log" 2>/dev/null
    return 0
}

case $act in probe | status | stop | clean | reset_fence) say "folder$tab$folder" ;; esac
"$act" "$@"
exit 0
