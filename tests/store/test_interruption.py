"""A request to cancel is seen between two tile products, wherever the tiles are read, and nowhere else."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from dkrr.errors import CancelledError
from dkrr.store.chunks import ChunkArray
from dkrr.store.interruption import cancellable, check_cancelled


def test_blocks_nest_and_belong_to_their_thread(tmp_path: Path) -> None:
    array = ChunkArray.create(str(tmp_path), "", shape=(4, 4), chunks=(4, 4))
    array.write((0, 0), np.eye(4))
    with cancellable(lambda: True):
        with cancellable(lambda: False), cancellable(None):
            array.read((0, 0))
        thread = threading.Thread(target=array.delete, args=((0, 0),))
        thread.start()
        thread.join()
        with pytest.raises(CancelledError) as caught:
            array.read((0, 0))
    assert caught.value.exit_code == 75
    check_cancelled()
    assert not array.is_valid((0, 0))
