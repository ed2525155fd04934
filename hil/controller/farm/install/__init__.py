"""Files to install a farm: systemd units, containers, dashboard and alerts."""
