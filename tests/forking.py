"""Scripts in processes that are forked from one which has imported torch: they begin at once."""

from __future__ import annotations

import multiprocessing
import runpy
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

LAUNCHER = """
import os, signal, sys, types, warnings

os.setsid()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # in which the one that forks may be deaf
for stream in (1, 2):
    os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
os.environ.update(environment)
os.chdir(os.path.dirname(script))
warnings.simplefilter("ignore")
sys.argv = [script, *arguments]
sys.path.insert(0, os.path.dirname(script))
main = types.ModuleType("__main__")
main.__dict__.update(given, __file__=script)
sys.modules["__main__"] = main
with open(script, encoding="utf-8") as file:
    exec(compile(file.read(), script, "exec"), main.__dict__)
"""


def start_script(
    script: Path,
    arguments: list[str],
    printed: Path,
    environment: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> BaseProcess:
    """Run a script as `python script …` would, in a session of its own and in its folder.

    Args:
        script: its file.
        arguments: those after its name.
        printed: the file to which all goes that it prints.
        environment: variables to set.
        given: further names that it finds, such as one end of a pipe.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["theodolite.fleet.engine", "torch._dynamo", "torch.distributed.fsdp"])
    launcher = printed.with_name(f"{printed.name} launcher.py")
    launcher.write_text(LAUNCHER)
    names = {
        "script": str(script.resolve()),
        "arguments": arguments,
        "printed": str(printed.resolve()),
        "environment": dict(environment or {}),
        "given": dict(given or {}),
    }
    process = context.Process(target=runpy.run_path, args=(str(launcher),), kwargs={"init_globals": names})
    process.start()
    return process
