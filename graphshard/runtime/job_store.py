"""The job's store, whose calls all end.

In: the store of the default process group. Out: the same one, by prefix. A store answers a look at
its keys at once or never: never when the network is lost without a word, and torch's client then
waits for ever. Nothing here waits for a key to be set: while one call waits, torch's client keeps
all others of the process waiting, and so whoever else uses the job's store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from graphshard.errors import StoreLost
from graphshard.runtime.limited import begin

# What a look at a missing key gives. No value here begins with this character.
_NONE = "\0missing"


@dataclass(slots=True, eq=False)
class _Line:
    """The connection to one store. is_lost: a call was not answered in time."""

    store: Any
    limit_s: float
    is_lost: bool = False

    def call(self, name: str, *args: Any) -> Any:
        """Raises StoreLost (GS704) if it fails or is not answered within `limit_s`, and then on."""
        if self.is_lost:
            raise StoreLost("GS704", f"the job's store did not answer within {self.limit_s:.0f} s")
        task = begin(lambda: getattr(self.store, name)(*args), answered_at_once=True)
        try:
            if task.is_over_within(self.limit_s):
                return task.result
        except dist.DistError as error:
            raise StoreLost("GS704", "the job's store went away") from error
        self.is_lost = True
        return self.call(name, *args)


@dataclass(frozen=True, slots=True, eq=False)
class JobStore:
    """Keys of the job's store that begin with `prefix`."""

    line: _Line
    prefix: str = ""

    def below(self, name: str) -> JobStore:
        return replace(self, prefix=f"{self.prefix}{name}/")

    def set(self, key: str, value: str) -> None:
        self.line.call("set", self.prefix + key, value)

    def get(self, key: str) -> bytes | None:
        """What is under the key; None if it is not there.

        `get` of torch's stores waits for a missing key; this exchanges nothing for nothing.
        """
        found: bytes = self.line.call("compare_set", self.prefix + key, _NONE, _NONE)
        return None if found == _NONE.encode() else found

    def claim(self, key: str, value: str) -> str:
        """What is under the key; `value`, from now on, if nothing was there."""
        found: bytes = self.line.call("compare_set", self.prefix + key, "", value)
        return found.decode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """What is under keys that are there and stay."""
        found: list[bytes] = self.line.call("multi_get", [self.prefix + key for key in keys])
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self.line.call("check", [self.prefix + key for key in keys]))

    def add(self, key: str, amount: int) -> int:
        return int(self.line.call("add", self.prefix + key, amount))

    def delete_key(self, key: str) -> bool:
        return bool(self.line.call("delete_key", self.prefix + key))


def job_store(store: Any, limit_s: float) -> JobStore:
    """limit_s: for one call."""
    return JobStore(_Line(store, limit_s))
