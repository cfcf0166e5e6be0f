"""A script that a worker cannot import in less than ten minutes; it notes which worker tries."""

import os
import time

if __name__ == "__main__":
    from theodolite.fleet import pool

    pool.PRELOADED = []  # no worker gets as far as to need it
    list(pool.pooled(int, ["3"], 1))
else:  # as a worker imports it
    with open("worker.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("worker.part", "worker")
    time.sleep(600)
