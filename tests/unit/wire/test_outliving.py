"""What outlives the interpreter is not collected when it ends."""

import subprocess
import sys

SCRIPT = """
import os
from ferrorpc.wire.outliving import outlives_interpreter

class Call:
    def __init__(self, name):
        self.name, self.myself = name, self

    def __del__(self, write=os.write):
        write(1, self.name + b" is collected")

kept, other = Call(b"kept"), Call(b"other")
outlives_interpreter(kept)
"""


def test_only_what_is_not_kept_is_collected_at_the_end():
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=True)
    assert (found.stdout, found.stderr) == ("other is collected", "")
