# shellcheck shell=sh
# LIMIT_S WAIT_S FOLDER OUTPUT... -- PROGRAM ARGUMENT...: run a program. Needs memory.sh.
#
# The program leads a separate process group. The group is killed at the limit, or when the link breaks: the script
# writes a line every second, which then fails. Only one program runs at a time: it holds the lock on the directory of
# all runs until it ends.
umask 077
# dash and busybox have -c.
# shellcheck disable=SC3045
ulimit -c 0 2>/dev/null
export ORT_DISABLE_TELEMETRY="${ORT_DISABLE_TELEMETRY-1}"
limit=$1 patience=$2 run=$3 waited=0; shift 3
cd -- "$run" || { echo hil-command gone; exit 0; }
outputs=0; for one do [ "$one" = -- ] && break; outputs=$((outputs + 1)); done
rm -f -- o[0-9]* out err late
if command -v flock >/dev/null 2>&1; then
  exec 9<..
  until flock -n 9; do
    [ "$waited" -lt "$patience" ] || { echo hil-command busy; exit 0; }
    waited=$((waited + 1))
    sleep 1
    echo .
  done
fi
start() {
  while [ "$1" != -- ]; do shift; done
  shift
  # If memory runs out, Linux kills the program before the board's services. An agent also uses the value 500.
  { echo 500 >/proc/self/oom_score_adj; } 2>/dev/null
  if command -v setsid >/dev/null 2>&1; then exec setsid "$@"; fi
  exec "$@"
}
oom=$(oom_kills)
start "$@" </dev/null >out 2>err &
tool=$!
trap '' PIPE HUP
(
  exec 9>&-
  end() { kill -9 "-$tool" 2>/dev/null || kill -9 "$tool" 2>/dev/null; }
  while kill -0 "$tool" 2>/dev/null; do
    [ "$limit" -gt 0 ] || { : >late; end; break; }
    sleep 1 >/dev/null 2>&1
    limit=$((limit - 1))
    echo . 2>/dev/null || { end; break; }
  done
) &
watch=$!
wait "$tool" 2>/dev/null
code=$?
kill "$watch" 2>/dev/null
wait "$watch" 2>/dev/null
[ -e late ] && code=late
[ "$code" = 137 ] && [ "$(oom_kills)" != "$oom" ] && memory
echo "hil-command $code $waited" 2>/dev/null || { cd ..; rm -rf -- "$run"; exit 1; }
while [ "$outputs" -gt 0 ]; do
  if [ -f "$1" ]; then wc -c <"$1"; else echo -; fi
  outputs=$((outputs - 1)); shift
done
echo hil-command
tail -c 65536 out
tail -c 65536 err >&2
exit 0
