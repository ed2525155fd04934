# shellcheck shell=sh
# FOLDER MINUTES: remove programs unused for MINUTES, then print `df` of the directory.
find "$1/programs" -type f -mmin "+$2" -exec rm -f -- {} \; 2>/dev/null
df -Pk -- "$1" 2>/dev/null || df -k "$1"
