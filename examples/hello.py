"""The smallest program: each process brings an array, and all of them get the sum.

    ferrorpc run -n 4 examples/hello.py

`python examples/hello.py` runs it with a single process.
"""

import numpy as np

import ferrorpc

with ferrorpc.init_process_group() as group:
    mine = np.full(3, group.rank + 1.0)
    total = group.all_reduce(mine)
    print(f"rank {group.rank} of {group.size}: {mine} became {total}")
