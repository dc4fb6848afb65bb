"""What may be a secret does not get into a page; what is none stays."""

from __future__ import annotations

import pytest

from dkrr.jobs.report.scrub import REMOVED, scrub, secret_values


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hidden@host/path",
        "s3://bucket/key?X-Amz-Signature=hidden",
        "the key AKIAHIDDENHIDDENHIDD was refused".replace("HIDDENHIDDENHIDD", "ABCDEFGHIJKLMNOP"),
        "password=hidden",
        "password: hidden",
        "AWS_SECRET_ACCESS_KEY=hidden",
        "api-key = hidden",
        "Authorization: Bearer hidden.hidden",
    ],
)
def test_secrets_are_removed(text: str) -> None:
    found = scrub(text, [])
    assert REMOVED in found
    assert "hidden" not in found
    assert "ABCDEFGHIJKLMNOP" not in found


@pytest.mark.parametrize(
    "text",
    [
        "https://host:9000/path",
        "s3://bucket/runs/demo?endpoint_url=https://host:9000&region=eu-1",
        "tokens a second",
        "tcp://10.0.0.1:8786",
        "alpha = 0.1",
        "tile (1, 2) of /data/a@b/store",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert scrub(text, []) == text


def test_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-the-environment")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/a/path/of/a/file")
    monkeypatch.setenv("MY_PASSWORD", "short")
    monkeypatch.setenv("MY_FOLDER", "a-folder-of-mine")
    assert "a-folder-of-mine" not in secret_values()
    assert "of-the-environment" in secret_values()
    assert "/a/path/of/a/file" not in secret_values()
    assert "short" not in secret_values()
    found = scrub({"list": ["x of-the-environment y", 3], "of-the-environment": None})
    assert found == {"list": [f"x {REMOVED} y", 3], REMOVED: None}
