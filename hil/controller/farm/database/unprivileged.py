"""Run a program without root privileges, and end it with the parent process. PostgreSQL refuses to run as root.

Run this file as a script: ``unprivileged.py FOLDER PARENT COMMAND...``. If root starts the script, the script drops
root privileges. If possible, the script enters a user namespace in which it still owns root's files. Otherwise, the
script switches to an unprivileged user and makes this user the owner of the directory.
"""

import ctypes
import os
import pwd
import signal
import sys

_CLONE_NEWUSER = 0x10000000
_PR_SET_PDEATHSIG = 1


def main(folder: str, parent: str, *command: str) -> None:
    """Execute the command in place of this process."""
    if os.geteuid() == 0:
        _give_up_root(folder)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
        if os.getppid() != int(parent):
            sys.exit("the parent process has ended")
    os.execv(command[0], command)


def _give_up_root(folder: str) -> None:
    nobody = pwd.getpwnam("nobody")
    owner = os.stat(folder).st_uid
    if owner == 0 and _enter_namespace(nobody):
        return
    if owner == 0:
        owner = nobody.pw_uid
        os.chown(folder, owner, -1)
    os.setgroups([])
    os.setgid(pwd.getpwuid(owner).pw_gid)
    os.setuid(owner)


def _enter_namespace(nobody: pwd.struct_passwd) -> bool:
    """Enter a user namespace that maps root to the user nobody. Returns False if the system does not allow it."""
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(_CLONE_NEWUSER) != 0:
        return False
    user, group = f"{nobody.pw_uid} 0 1", f"{nobody.pw_gid} 0 1"
    for name, text in (("setgroups", "deny"), ("uid_map", user), ("gid_map", group)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
