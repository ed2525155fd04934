# shellcheck shell=sh
# oom_kills prints the number of OOM kills so far (nothing before Linux 4.13). memory prints the machine's memory, and
# LIMIT USED in bytes for each control group of a run.
oom_kills() { grep '^oom_kill ' /proc/vmstat 2>/dev/null; }
groups() {
  group=$2
  while :; do
    [ -r "$1$group/$3" ] && echo "group $(cat "$1$group/$3") $(cat "$1$group/$4")"
    case $group in /*) group=${group%/*} ;; *) break ;; esac
  done
}
memory() {
  echo hil-memory
  grep -e '^MemTotal:' -e '^MemAvailable:' /proc/meminfo
  all=/proc/self/cgroup
  groups /sys/fs/cgroup "$(sed -n 's/^0:://p' $all)" memory.max memory.current
  groups /sys/fs/cgroup/memory "$(sed -n 's/^[0-9]*:memory://p' $all)" memory.limit_in_bytes memory.usage_in_bytes
  echo hil-memory
} 2>/dev/null
