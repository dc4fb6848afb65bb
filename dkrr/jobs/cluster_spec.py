"""``[cluster]`` of a job, and what a place says about it.

One job file is to run on a laptop, under Slurm and on Kubernetes: it leaves ``scheduler`` out, and Dask's configuration
of the place has the table ``dkrr.cluster`` (:mod:`dkrr.engine.configuration`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from dkrr.engine import configuration
from dkrr.errors import JobFileError
from dkrr.jobs import mistakes
from dkrr.jobs.fields import ByteSize, is_loopback, locate
from dkrr.jobs.kernel_table import Table
from dkrr.store.files import is_url

__all__ = ["ClusterSpec", "with_cluster_of_this_place"]


class ClusterSpec(Table):
    """``[cluster]``: where the work runs. ``scheduler`` is "local", tcp://..., tls://... or a scheduler file.

    A job that names no scheduler gets what Dask's configuration says under ``dkrr.cluster`` for all keys it leaves out.

    Parameters
    ----------
    scheduler
        "local" starts workers here; or tcp://host:port, tls://host:port, or a scheduler file.
    workers
        The number of worker processes; one for each core unless given. Of a scheduler: how many to wait for.
    threads_per_worker
        Threads of each; processes are faster than threads.
    memory_limit
        Memory of each worker; tiles are chosen to fit into it.
    insecure
        Allow a scheduler on tcp:// that is not on this machine: whoever reaches it can run any code there.
    """

    scheduler: str = "local"
    workers: Annotated[int, Field(ge=1)] | None = None
    threads_per_worker: Annotated[int, Field(ge=1)] = 1
    memory_limit: ByteSize = "auto"
    insecure: bool = False

    @field_validator("scheduler")
    @classmethod
    def _check_scheduler(cls, value: str, info: ValidationInfo) -> str:
        if value == "local":
            return value
        if is_url(value) and urlsplit(value).scheme not in {"tcp", "tls"}:
            raise ValueError('"local", tcp://host:port, tls://host:port or a scheduler file expected')
        return locate(value, info)

    @model_validator(mode="after")
    def _refuse_open_scheduler(self) -> Self:
        # whoever reaches an open scheduler can run any code on its workers
        if self.scheduler.startswith("tcp://") and not self.insecure and not is_loopback(self.scheduler):
            raise ValueError(
                f"scheduler {self.scheduler} is reached without encryption and authentication;"
                " use tls://, or say insecure = true where the network is trusted"
            )
        return self


class _Place(Table):
    cluster: ClusterSpec


def with_cluster_of_this_place(document: dict[str, Any], base: Path) -> dict[str, Any]:
    """The job with what ``dkrr.cluster`` says, if it names no scheduler; its own keys win.

    Parameters
    ----------
    document
        The job as nested dicts, unchecked.
    base
        Folder that the job's relative paths mean.

    Raises
    ------
    ParameterError
        ``dkrr.cluster`` has an unknown key.
    JobFileError
        It has a value that ``[cluster]`` must not have.
    """
    own = document.get("cluster", {})
    if not isinstance(own, dict) or "scheduler" in own:
        return document
    table = configuration.cluster_defaults(ClusterSpec.model_fields)
    if not table:
        return document
    try:
        _Place.model_validate({"cluster": table}, context={"base": base})
    except ValidationError as exc:
        found = mistakes.describe(exc, text="", source="Dask's configuration of dkrr")
        raise JobFileError(found.message, hint=found.hint) from None
    return {**document, "cluster": {**table, **own}}
