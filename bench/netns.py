"""Two ranks with a rate-limited network between them: network namespaces joined by a veth pair.

Real sockets and real gloo; the kernel's token bucket (tc tbf) limits what leaves each namespace.
Needs root, `ip` and `tc`. `joined` makes the namespaces and takes them away again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

RANKS = 2
DEVICE = "rank"
# Above one segment of 64 KiB that the kernel hands over at once, and small against a collective.
BURST = "256kb"
PORT = 29_511


@dataclass(frozen=True, slots=True)
class Namespaces:
    """One name per rank; `address` is that of rank 0."""

    names: tuple[str, ...]
    address: str


def missing() -> str | None:
    """Why this machine cannot do it, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"not installed: {', '.join(tools)}" if tools else None


@contextlib.contextmanager
def joined(tag: str) -> Iterator[Namespaces]:
    """Two connected namespaces. tag: up to 6 letters that no other user of the machine has."""
    names = tuple(f"bench-{tag}{rank}" for rank in range(RANKS))
    cables = tuple(f"veth-{tag}{rank}" for rank in range(RANKS))
    subnet = f"10.77.{sum(tag.encode()) % 250}"
    try:
        for name in names:
            sh("ip", "netns", "add", name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("ip", "link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for rank, (name, cable) in enumerate(zip(names, cables, strict=True)):
            sh("ip", "link", "set", cable, "netns", name)
            sh("ip", "-n", name, "link", "set", cable, "name", DEVICE)
            sh("ip", "-n", name, "addr", "add", f"{subnet}.{rank + 1}/24", "dev", DEVICE)
            sh("ip", "-n", name, "link", "set", DEVICE, "up")
            # Bandwidth probing of other algorithms makes short bursts slower than the limit.
            sh(*inside(name), "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
            sh(*inside(name), "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")
        yield Namespaces(names, f"{subnet}.1")
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


def limit(network: Namespaces, gbit: float) -> None:
    """What each rank may send, from now on."""
    for name in network.names:
        sh(*inside(name), "tc", "qdisc", "replace", "dev", DEVICE, "root", *_bucket(gbit))


def limit_own(gbit: float) -> None:
    """What this rank may send, from now on; called inside its namespace."""
    sh("tc", "qdisc", "replace", "dev", DEVICE, "root", *_bucket(gbit))


def _bucket(gbit: float) -> tuple[str, ...]:
    rate = f"{round(gbit * 1000)}mbit"
    return "tbf", "rate", rate, "burst", BURST, "latency", "100ms"


def launch(network: Namespaces, command: Sequence[str], timeout_s: float) -> list[str]:
    """Run `command` as every rank. Returns stdout of each; raises RuntimeError if one fails."""
    processes = [
        subprocess.Popen(
            (*inside(name), *command),
            env=environment(network, rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(network.names)
    ]
    outputs = []
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=timeout_s)
            if process.returncode != 0:
                raise RuntimeError(f"rank {rank} of {' '.join(command)} failed:\n{err}")
            outputs.append(out)
    finally:
        for process in processes:
            process.kill()
    return outputs


def environment(network: Namespaces, rank: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": network.address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
    }


def inside(name: str) -> tuple[str, ...]:
    return "ip", "netns", "exec", name


def sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
