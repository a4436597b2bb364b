"""Refusals of the operating system, once each: Python imports this module as it starts."""

import errno
import os
import socket


def refuse(name, number, applies):
    original = getattr(os, name)

    def refusing(*args, **options):
        if applies(*args):
            raise OSError(number, os.strerror(number), *map(str, args[:1]))
        return original(*args, **options)

    setattr(os, name, refusing)


def once(name):
    try:
        os.close(os.open(os.environ["FAULTS"] + "/once-" + name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def unresolvable(*args, **options):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


faults = os.environ.get("LACKS", "").split()
if "space" in faults:
    refuse("mkdir", errno.ENOSPC, lambda path, *_: "pymp-" in str(path))
if "space-for-worlds" in faults:
    refuse("mkdir", errno.ENOSPC, lambda path, *_: "world-" in str(path))
if "processes" in faults and "LOCKSTEP_SERVER" in os.environ:
    refuse("fork", errno.EAGAIN, lambda: once("fork"))
if "space-for-logs" in faults:
    refuse("open", errno.EDQUOT, lambda path, *_: str(path).endswith("rank-1.log") and once("log"))
if "name" in faults:
    socket.getaddrinfo = socket.gethostbyname = socket.getfqdn = unresolvable
