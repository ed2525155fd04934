# shellcheck shell=sh
# PART SIZE MODE FILE: store stdin. SIZE distinguishes a broken link from the end of the file.
umask 077
cat >"$1" && [ "$(wc -c <"$1")" -eq "$2" ] && chmod "$3" "$1" && mv -f "$1" "$4" || { rm -f "$1"; exit 1; }
