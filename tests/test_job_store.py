"""The job's store is shared with the user and with torch: graphshard never makes them wait."""

import time
from datetime import timedelta
from threading import Thread

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from graphshard.runtime.job_store import job_store
from graphshard.runtime.leftovers import OwnStore

LONG = timedelta(seconds=30)


@pytest.fixture(params=["tcp", "tcp-legacy", "file", "memory"])
def store(request, tmp_path):
    """Behind a prefix, as the default process group has it."""
    if request.param == "file":
        made = FileStore(str(tmp_path / "store"), 1)
    elif request.param == "memory":
        made = HashStore()
    else:
        uv = request.param == "tcp"
        made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=uv)
    made.set_timeout(LONG)
    return PrefixStore("default", made)


def test_a_missing_key_is_not_waited_for(store):
    job = job_store(store, 10.0).below("model")
    began = time.monotonic()
    assert job.get("passed/1") is None
    assert not job.check(["passed/1"]), "to look is not to set"
    job.set("passed/1", "12")
    assert job.get("passed/1") == b"12"
    job.set("passed/1", "")
    assert job.get("passed/1") == b""
    job.delete_key("passed/1")
    assert job.get("passed/1") is None
    assert time.monotonic() - began < 5


def test_others_use_the_store_while_a_dropped_model_is_looked_at(store):
    """A neighbour's key may go between two looks: its model was dropped there."""
    own = OwnStore("model", job_store(store, 10.0), 2)
    looked = Thread(target=lambda: [own.get("passed/1") for _ in range(100)], daemon=True)
    looked.start()
    began = time.monotonic()
    for number in range(20):
        store.add("of the user", number)
    looked.join(5)
    assert not looked.is_alive()
    assert time.monotonic() - began < 5
