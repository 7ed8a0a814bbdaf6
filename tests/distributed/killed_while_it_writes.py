"""Runs the program that its arguments name; rank 1 is killed in the middle of the second checkpoint that it writes.

After torchrun has restarted it, no rank is killed.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

write = FileSystemWriter.write_data
written = 0
first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def write_half_of_the_second(self: FileSystemWriter, *args: Any) -> Any:
    global written
    written += 1
    future = write(self, *args)
    if first_attempt and (written, os.environ["RANK"]) == (2, "1"):
        future.wait()
        for file in self.path.glob("__1_*"):
            os.truncate(file, file.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    return future


FileSystemWriter.write_data = write_half_of_the_second
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)  # gloo's threads outlive their group, and one that frees a tensor while Python ends aborts the process
