# shellcheck shell=sh
# COMMAND...: run ssh while stdin is open, so that ssh ends even if hil is killed. Print the PID of ssh first.
exec 3<&0 </dev/null
"$@" 3<&- >/dev/null & ssh=$!
echo "$ssh"
{ read -r _ <&3; kill "$ssh"; } >/dev/null 2>&1 & watch=$!
wait "$ssh"
kill "$watch"
