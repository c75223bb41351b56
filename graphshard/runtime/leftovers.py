"""What a rank leaves in the job's store, and takes away again.

In: the keys that one ballot sets. Afterwards, however many models come and go, the store holds
those of the models that are alive and of the last one that was dropped. A rank may still read what
another one left there, so keys go only when all ranks have dropped their models; that is looked
into when the next model is prepared, never while garbage is collected.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphshard.errors import StoreLost
from graphshard.runtime.job_store import JobStore

logger = logging.getLogger(__name__)

_GONE, _CLEARED = "gone", "cleared"  # counters of ranks


class OwnStore:
    """The part of the job's store below `name`, which remembers what this rank has set there."""

    __slots__ = ("__weakref__", "_keys", "_last", "_store")

    def __init__(self, name: str, store: JobStore, num_ranks: int) -> None:
        self._store = store.below(name)
        self._keys: dict[str, None] = {}
        self._last: dict[str, list[str]] = {}
        left = _Left(store.line.store, self._store, self._keys, num_ranks)
        weakref.finalize(self, _LEFT.append, left).atexit = False

    def set(self, key: str, value: str) -> None:
        # Names of modules may hold what no encoding has.
        self._store.set(key, value.encode(errors="backslashreplace").decode())
        self._keys[key] = None

    def claim(self, key: str, value: str) -> str:
        self._keys[key] = None
        return self._store.claim(key, value.encode(errors="backslashreplace").decode())

    def get(self, key: str) -> bytes | None:
        return self._store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(keys)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        self._keys.pop(key, None)
        return self._store.delete_key(key)

    def replace_last(self, kind: str, keys: Sequence[str]) -> None:
        """All ranks have left their part of an exchange of this kind; `keys` is this rank's.

        Each rank reads all of one exchange before it leaves anything for the next one of its kind,
        so nobody needs what was left for the one before.
        """
        for key in self._last.get(kind, ()):
            if key in self._keys:
                self.delete_key(key)
        self._last[kind] = list(keys)


@dataclass(slots=True, eq=False)
class _Left:
    """Keys of a model that this rank has dropped. is_said: the other ranks can know."""

    base: Any
    store: JobStore
    keys: dict[str, None]
    num_ranks: int
    is_said: bool = False


# Of this process: models that were dropped here and perhaps not yet on other ranks. `take_away`
# empties it; it grows only with models that another rank keeps.
_LEFT: list[_Left] = []


def take_away(store: JobStore) -> None:
    """Delete from `store` what this rank left for models that no rank has any more."""
    for left in tuple(_LEFT):
        try:
            done = left.base is not store.line.store or _is_taken(left)
        except StoreLost as error:  # another rank ended, and the store with it
            logger.debug("keys of a dropped model stay: %s", error)
            done = True
        if done:
            _LEFT.remove(left)


def _is_taken(left: _Left) -> bool:
    """All ranks have dropped the model: this rank's keys are gone now."""
    store = left.store
    if store.add(_GONE, 0 if left.is_said else 1) < left.num_ranks:
        left.is_said = True
        return False
    for key in left.keys:
        store.delete_key(key)
    if store.add(_CLEARED, 1) == left.num_ranks:
        store.delete_key(_GONE)
        store.delete_key(_CLEARED)
    return True
