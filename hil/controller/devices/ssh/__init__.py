"""SSH: shells on boards, verified host keys, and tunnels to a board's sockets.

:func:`hil.controller.devices.ssh.connect.open_shell` logs in, with paramiko and fabric;
:func:`hil.controller.devices.ssh.tunnel.open_tunnel` leads to a socket on that board, by OpenSSH's client where there
is one.
"""
