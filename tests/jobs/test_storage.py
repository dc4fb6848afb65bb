"""[storage] in a job: addresses carry it in memory, files and documents do not."""

from __future__ import annotations

from typing import Any

import pytest

from dkrr.errors import JobFileError
from dkrr.jobs.spec import JobSpec
from dkrr.store.objects import StorageSettings, parse_address

STORAGE = {"endpoint_url": "http://127.0.0.1:9000", "region": "eu-1", "allow_http": True}
QUERY = "?endpoint_url=http://127.0.0.1:9000&region=eu-1&allow_http=true"


def document(**tables: Any) -> dict[str, Any]:
    return {
        "data": {"path": "s3://bucket/data/d.zarr"},
        "evaluate": {"path": "s3://bucket/data/test.zarr"},
        "storage": STORAGE,
        "output": {"directory": "s3://bucket/runs/demo"},
        **tables,
    }


def test_addresses_in_memory_can_be_opened_by_anybody() -> None:
    job = JobSpec.from_dict(document())
    assert job.data.path == "s3://bucket/data/d.zarr" + QUERY
    assert job.evaluate is not None
    assert job.evaluate.path == "s3://bucket/data/test.zarr" + QUERY
    assert job.directory == "s3://bucket/runs/demo" + QUERY
    assert job.store == "s3://bucket/runs/store" + QUERY
    assert job.run_id == "demo"
    assert parse_address(job.data.path).settings == StorageSettings(**STORAGE)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"storage": {"endpoint_url": "http://host:9000"}}, "reached without encryption"),
        ({"storage": {"endpoint_url": "host:9000"}}, "an address such as"),
        ({"data": {"path": "gs://bucket/a"}}, "gs:// is not supported"),
        ({"data": {"path": "s3://hunter2@bucket/a"}}, "an address with a credential in it"),
        ({"data": {"path": "s3://user:hunter2@bucket/a"}}, "an address with a password in it"),
        ({"data": {"path": "s3://bucket/a?X-Amz-Signature=hunter2"}}, "an address with a credential in it"),
        ({"data": {"path": "s3://b/a?endpoint_url=https://u:hunter2@host"}}, "an address with a password in it"),
    ],
)
def test_what_is_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(JobFileError) as caught:
        JobSpec.from_dict(document(**tables))
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)
