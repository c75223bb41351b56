"""Calls that another thread makes: what an exit waits for."""

import subprocess
import sys

import pytest

# A call that comes back 0.4 s after the script has ended, while the interpreter takes 1.5 s to end.
SCRIPT = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from graphshard.runtime.limited import begin

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
sys.late = Late()
for answered_at_once in (False, True):
    line = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    call = lambda line=line: line.wait(["never"], timedelta(seconds=0.4))
    begin(call, answered_at_once=answered_at_once)
"""


# torchrun passes on a Ctrl-C that the terminal has sent already: the second comes while the process
# ends because of the first.
INTERRUPTED = """
import signal
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
"""


@pytest.mark.parametrize("ends", ["", INTERRUPTED], ids=["by itself", "interrupted"])
def test_a_call_in_flight_does_not_abort_the_process_at_its_end(ends: str) -> None:
    command = [sys.executable, "-c", SCRIPT + ends]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
