"""Run the suite as other machines would: `make test-elsewhere`, or `python tests/elsewhere.py SETTING...`.

Settings are joined by `+`; each argument is one run of the whole suite:

    avx2       the kernels of a CPU without AVX-512
    sse41      the kernels of a CPU without AVX2
    busy       four loops beside it that never rest
    shuffled   test files, and tests within a file, in another order
    home       a home folder in which nothing can be written
    offline    no network but the loopback (Linux, by a namespace of its own)

What follows `--` goes to pytest: `python tests/elsewhere.py avx2+busy -- tests/fleet -x`. Another Python is
another environment: `make test PYTHON=python3.13` in a fresh clone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

USUAL = ("avx2+shuffled+home+offline", "sse41+busy")

VARIABLES = {
    # of torch, of oneDNN, and of what numpy and scipy call
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "COMPATIBLE",
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL",
    },
    "sse41": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL",
    },
    "busy": {},
    "shuffled": {"SHUFFLED": "17"},  # the seed; conftest.py reads it
    "home": {"HOME": "/proc"},  # where not even root can make a file
    "offline": {},
}
ONLY_THE_LOOPBACK = 'ip link set lo up 2>/dev/null || ifconfig lo up; exec "$@"'


def run(settings: str, arguments: list[str]) -> bool:
    """One run of the suite. Does it pass?"""
    chosen = settings.split("+")
    unknown = [name for name in chosen if name not in VARIABLES]
    if unknown:
        sys.exit(f"no setting {unknown[0]!r}: there are {', '.join(VARIABLES)}")
    command = [sys.executable, "-m", "pytest", "-n", os.environ.get("NPROC", "4"), "--dist", "worksteal"]
    command += arguments
    if "offline" in chosen:
        command = ["unshare", "--map-root-user", "--net", "sh", "-c", ONLY_THE_LOOPBACK, "sh", *command]
    variables = {name: value for setting in chosen for name, value in VARIABLES[setting].items()}
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * ("busy" in chosen))
    ]
    try:
        return subprocess.run(command, env=os.environ | variables, check=False).returncode == 0
    finally:
        for process in loops:
            process.kill()


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    results = []
    for settings in arguments[:cut] or USUAL:
        print(f"== {settings}", flush=True)
        begun = time.monotonic()
        passed = "passed" if run(settings, arguments[cut + 1 :]) else "FAILED"
        results.append(f"{passed}  {settings}  {(time.monotonic() - begun) / 60:.1f} min")
    print(*results, sep="\n")
    return int(any(line.startswith("FAILED") for line in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
