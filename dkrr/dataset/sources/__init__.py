"""Everything that rows can be ingested from, as one kind of table."""

from dkrr.dataset.sources.open import open_table
from dkrr.dataset.sources.table import Table

__all__ = ["Table", "open_table"]
