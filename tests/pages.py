"""A page taken apart: its sections, its pictures, everything that it refers to."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from functools import cached_property

SECTIONS = (
    "asked", "data", "time", "memory", "rate", "convergence", "residuals", "held-out", "plan", "reuse", "versions",
    "events",
)  # fmt: skip
_RUNS = {"script", "iframe", "object", "embed", "base", "form", "audio", "video", "img", "image", "foreignObject"}
_REFERS = {"href", "src", "srcset", "action", "data", "poster", "formaction", "background", "ping", "cite"}


class Page:
    """What a reader, or a program that reads aloud, finds in a page; one that is no well-formed XML is an error."""

    def __init__(self, text: str) -> None:
        self.text, self.root = text, ET.fromstring(text.removeprefix("<!DOCTYPE html>"))  # noqa: S314  (ours)

    @cached_property
    def tags(self) -> list[tuple[str, dict[str, str]]]:
        return [(item.tag, item.attrib) for item in self.root.iter()]

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.tags if "id" in attributes]

    @property
    def sections(self) -> dict[str, str]:
        return {item.attrib["id"]: words(item) for item in self.root.iter("section")}

    @property
    def headings(self) -> list[tuple[int, str]]:
        return [(int(item.tag[1]), words(item)) for item in self.root.iter() if re.fullmatch(r"h\d", item.tag)]

    def count(self, tag: str) -> int:
        """How many elements of this kind there are."""
        return sum(name == tag for name, _ in self.tags)


def words(item: ET.Element) -> str:
    """The text of an element, its parts set apart."""
    return " ".join(" ".join(item.itertext()).split())


def outside_references(page: Page) -> list[str]:
    """Everything that a browser could fetch or run: addresses, scripts, handlers, styles that import."""
    found = [f"<{tag}>" for tag, _ in page.tags if tag in _RUNS]
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            refers = name.rpartition("}")[2] in _REFERS and not value.startswith("#") and value != "data:,"
            if refers or name.startswith("on") or (name == "style" and "url(" in value):
                found.append(f"{tag} {name}={value!r}")
    for style in re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL):
        found += re.findall(r"url\([^)]*\)|@import[^;]*|@font-face", style)
    return found
