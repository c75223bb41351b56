"""What may happen to a rank, and what only one rank's own code may do."""

import ctypes
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

from processes import Place

PAUSE_S = 3.0  # longer than a collective may take unnoticed, shorter than the group's limit
SO_ATTACH_FILTER = 26  # socket(7)
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: return, keep 0 bytes


class Boom(Exception):
    pass


def kill(place: Place) -> None:
    place.note_fault()
    os.kill(os.getpid(), signal.SIGKILL)


def stop(place: Place) -> None:
    place.note_fault()
    os.kill(os.getpid(), signal.SIGSTOP)


def pause(place: Place) -> None:
    """Stopped for a while, with all threads, by a child that wakes it up."""
    place.note_fault()
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(PAUSE_S)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


def fail(place: Place) -> None:
    place.note_fault()
    raise Boom(f"rank {place.rank}")


def sleep(place: Place) -> None:
    place.note_fault()
    time.sleep(PAUSE_S)


def full_disk(place: Place) -> None:
    """No file may grow any more."""
    place.note_fault()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def interrupt(place: Place) -> None:
    """Ctrl-C, as torchrun hands it on to each rank."""
    place.note_fault()
    os.kill(os.getpid(), signal.SIGINT)


def connections() -> Iterator[socket.socket]:
    """This process's own, to the other ranks and to the store."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket, or closed since
            one = socket.socket(fileno=os.dup(int(name)))
            with one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    yield one


def lose_network(place: Place) -> None:
    """No packet reaches this rank any more, and nobody is told."""
    place.note_fault()
    code = ctypes.create_string_buffer(DROP_ALL)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for one in connections():
        one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def cut_network(place: Place) -> None:
    """Every connection of this rank ends, and both sides are told."""
    place.note_fault()
    for one in connections():
        with suppress(OSError):  # one that listens
            one.getpeername()
            one.shutdown(socket.SHUT_RDWR)


ACTIONS = {
    "kill": kill,
    "stop": stop,
    "pause": pause,
    "raise": fail,
    "slow": sleep,
    "full disk": full_disk,
    "interrupt": interrupt,
    "lose network": lose_network,
    "cut network": cut_network,
}


# Of the user's own code, on one rank only; at a point of OWN_POINTS. "once more": a micro-step.
SETTINGS = {
    "once more": lambda model: None,
    "unshard": lambda model: model.layers[1].unshard(),
    "unshard root": lambda model: model.unshard(),
    "unshard async": lambda model: model.layers[2].unshard(async_op=True),
    "keep": lambda model: model.set_reshard_after_forward(False),
    "keep one": lambda model: model.layers[1].set_reshard_after_forward(False),
    "no sync": lambda model: model.layers[1].set_requires_gradient_sync(False, recurse=False),
    "prefetch": lambda model: model.layers[0].set_modules_to_forward_prefetch([model.layers[2]]),
}
