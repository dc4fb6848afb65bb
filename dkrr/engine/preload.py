"""Dask preload of local nannies and workers: a process dies with the process that started it.

A worker that outlived a killed command would go on writing tiles into a store that the next command is using. On Linux
the kernel sends SIGKILL to a process when its parent is gone (PR_SET_PDEATHSIG), whatever the process is busy with; the
chain is client process, nanny, worker. Elsewhere a worker notices only that it lost its scheduler.

The signal is tied to the *thread* that started the process. Nannies are started by the event loop thread of the
cluster, which ends after they do, and a nanny starts its worker from a thread that waits for the worker's exit.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from typing import Any

PARENT_PID = "DKRR_PARENT_PID"
"""Environment variable that tells a nanny the process id of the process that started it."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; end at once when the parent is gone already.

    Parameters
    ----------
    parent_pid
        Process id of the parent, known from before the parent could have died.
    """
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # A parent that died before the call above sends no signal; its children have another parent by now.
    if os.getppid() != parent_pid:
        os._exit(1)


def dask_setup(server: Any) -> None:
    """Called by Dask before ``server`` (a nanny or a worker) accepts work."""
    parent = multiprocessing.parent_process()  # a nanny's worker has one, a nanny has none
    pid = parent.pid if parent is not None else int(os.environ.get(PARENT_PID, os.getppid()))
    if pid is not None:
        die_with_parent(pid)
