"""Read an HTML page as its elements."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "input", "br", "hr", "img", "link", "base", "source", "embed"}


@dataclass
class Element:
    """An element with the text of everything in it."""

    tag: str
    attributes: dict[str, str]
    parents: tuple[str, ...]  # tags, from the root
    text: str = ""
    inside: list["Element"] = field(default_factory=list)  # in the order of the page

    def all(self, tag: str, **attributes: str) -> list["Element"]:
        """Return the elements inside with a tag and attributes (`class_` is a word of it)."""
        word = attributes.pop("class_", None)
        return [
            one
            for one in self.inside
            if one.tag == tag
            and attributes.items() <= one.attributes.items()
            and (word is None or word in one.attributes.get("class", "").split())
        ]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {}, ())
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        element = Element(tag, attributes, tuple(one.tag for one in self._open[1:]))
        for outer in self._open:
            outer.inside.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data


def read_page(path: Path) -> Element:
    """Return a page; every tag must be closed where it must be, and none elsewhere."""
    parser = _Parser()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert len(parser._open) == 1, "a tag is not closed"
    return parser.root
