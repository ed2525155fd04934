# shellcheck shell=sh
# FILE...: print size and SHA-256 of each file, or "-" if missing. Touch existing files to mark their use.
for file do
  if [ -f "$file" ]; then
    touch -- "$file"
    size=$(wc -c <"$file") || exit 1
    sum=$(sha256sum <"$file" 2>/dev/null)
    echo "$((size)) ${sum%% *}"
  else
    echo -
  fi
done
