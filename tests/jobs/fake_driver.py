"""Stands for a driver: notes in the run's directory who it is and who started it, and stays for a moment."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    print("the driver was here", flush=True)
    note = {"pid": os.getpid(), "session": os.getsid(0), "cwd": os.getcwd(), "terminal": sys.stdin.isatty()}
    draft = Path(sys.argv[1], "ran.partial")
    draft.write_text(json.dumps(note))
    draft.rename(Path(sys.argv[1], "ran.json"))
    time.sleep(float(os.environ.get("DRIVER_SECONDS", "0")))
