"""The fresh process of one contender: ``python -m tests.benchmarks.runner module:function SPEC.json RESULT``.

SPEC.json holds the keyword arguments of the function. What it returns is written to RESULT.json, an array under
"answer" to RESULT.npy.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
from pathlib import Path

import numpy as np


def main(target: str, specification: str, result: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash at full size would write a core file of gigabytes
    module, _, name = target.partition(":")
    facts = getattr(importlib.import_module(module), name)(**json.loads(Path(specification).read_text()))
    answer = facts.pop("answer", None)
    if answer is not None:
        np.save(f"{result}.npy", np.asarray(answer, dtype=np.float64))
    Path(f"{result}.json").write_text(json.dumps(facts))


if __name__ == "__main__":  # Dask's LocalCluster imports this module once more in every worker
    main(*sys.argv[1:])
