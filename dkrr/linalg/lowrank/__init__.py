"""The low-rank preconditioner F F^T + alpha I: pivots, panels on disk, Woodbury's formula."""
