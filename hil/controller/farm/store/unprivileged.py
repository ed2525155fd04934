"""Becomes another program that root may not be (PostgreSQL refuses to run as root) and that ends with its parent.

Run as a script, by the path of this file: ``unprivileged.py FOLDER PARENT COMMAND...``. Started by root, it gives up
root's rights: where the system lets it, in a user namespace, in which root's files still are its own; else as a user
that may do little, who is then given the folder.
"""

import ctypes
import os
import pwd
import signal
import sys

_CLONE_NEWUSER = 0x10000000
_PR_SET_PDEATHSIG = 1


def main(folder: str, parent: str, *command: str) -> None:
    """Become the command."""
    if os.geteuid() == 0:
        _give_up_root(folder)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
        if os.getppid() != int(parent):
            sys.exit("whoever started this is gone")
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
    """Into a user namespace in which we, root outside, are nobody; false where the system does not let us."""
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(_CLONE_NEWUSER) != 0:
        return False
    user, group = f"{nobody.pw_uid} 0 1", f"{nobody.pw_gid} 0 1"
    for name, text in (("setgroups", "deny"), ("uid_map", user), ("gid_map", group)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
