# shellcheck shell=sh
# Functions for probe.sh. `part` prints the title of a part. `readings` prints FILE:VALUE for all state that may change
# during a run.
part() { printf '\nhil-command %s\n' "$1"; }
readings() (
  cd /sys/devices/system/cpu 2>/dev/null &&
    grep -Hs . cpufreq/policy*/scaling_cur_freq cpufreq/policy*/scaling_max_freq cpufreq/policy*/scaling_governor \
      cpu[0-9]*/thermal_throttle/*_throttle_count
  cd /sys/class/thermal 2>/dev/null &&
    grep -Hs . thermal_zone*/type thermal_zone*/temp cooling_device*/type cooling_device*/cur_state
  grep -Hs . /sys/devices/platform/soc*/soc*firmware/get_throttled | sed 's/.*get_throttled:/get_throttled:/'
  grep -Hs ^MemAvailable: /proc/meminfo
)
