"""A process that has imported torch and torch.compile, and forks a child for each program; forked.py starts it.

It reads one request a line and answers with two: the child's process id, then its exit code.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import warnings
from types import ModuleType
from typing import Any

import torch._dynamo.convert_frame
import torch._functorch.aot_autograd
import torch._inductor.scheduler
import torch.distributed.tensor


def serve() -> dict[str, Any]:
    """Fork for each request, and return it in the child; the server itself ends with its input."""
    requests, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.dup(1)  # a child must not read what is not its own
    while line := requests.readline():
        child = os.fork()
        if child == 0:
            requests.close()
            os.close(answers)
            return json.loads(line)
        os.write(answers, b"%d\n" % child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, b"%d\n" % code)
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Give this process the folder, the environment, the files and the arguments of the program."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    output, errors = request["output"]
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY), (2, errors, os.O_WRONLY)):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = request["argv"]
    paths = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [request["folder"], *paths, *(path for path in sys.path[1:] if path not in paths)]
    torch._dynamo.config.debug_dir_root = os.path.join(request["cwd"], "torch_compile_debug")
    if "TORCH_LOGS" in os.environ:
        torch._logging._init_logs()  # as the import of torch does
    for action in request["warnings"]:
        warnings.simplefilter(action)


gc.freeze()
atexit.register(gc.unfreeze)  # nanobind says at the end what was not freed
given = serve()
become(given)
main = sys.modules["__main__"] = ModuleType("__main__")
if given["file"] is not None:
    main.__file__ = given["file"]
exec(compile(given["text"], given["file"] or "<string>", "exec", dont_inherit=True), main.__dict__)
