"""As another user, read a ledger and try to write to it: `read_as_nobody.py SOURCE FOLDER SPEC`."""

import json
import os
import sys
import urllib.parse  # which pathlib imports late, perhaps from where nobody may read

assert urllib.parse
sys.path.insert(0, sys.argv[1])
from theodolite.fleet.ledger import Ledger  # noqa: E402

folder = sys.argv[2]
if os.geteuid() == 0:
    try:
        os.seteuid(65534)  # nobody
    except OSError:
        sys.exit("there is nobody else")
with Ledger.read(folder) as ledger:
    print(ledger.rows()[0]["held_out"])
try:
    Ledger.open(folder, name="first", spec=json.loads(sys.argv[3]))
except ValueError as error:
    print(error)
