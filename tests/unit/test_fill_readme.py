import pytest

from tools.fill_readme import README, filled

TEXT = "a\n<!-- t:begin -->\nold\n<!-- t:end -->\nb\n"


def test_only_the_text_between_the_markers_changes() -> None:
    once = filled(TEXT, "t", "| new |\n")
    assert once == "a\n<!-- t:begin -->\n| new |\n<!-- t:end -->\nb\n"
    assert filled(once, "t", "| new |") == once


def test_missing_markers_raise() -> None:
    with pytest.raises(ValueError, match="<!-- other:begin -->"):
        filled(TEXT, "other", "x")


@pytest.mark.parametrize("name", ["patterns", "benchmarks"])
def test_the_readme_has_both_blocks(name: str) -> None:
    assert "MARK" in filled(README.read_text(encoding="utf-8"), name, "MARK")
