# shellcheck shell=sh
# PART SIZE MODE FILE: write stdin to PART, then rename PART to FILE. If the link breaks, PART has less than SIZE bytes.
umask 077
cat >"$1" && [ "$(wc -c <"$1")" -eq "$2" ] && chmod "$3" "$1" && mv -f "$1" "$4" || { rm -f "$1"; exit 1; }
