"""The picture of docs/architecture.md is drawn from the code as it is now."""

from pathlib import Path

from architecture import svg

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "architecture.svg"


def test_the_picture_is_true() -> None:
    """Make it again: python tests/helpers/architecture.py > docs/pictures/architecture.svg."""
    assert PICTURE.read_text(encoding="utf-8") == svg()
