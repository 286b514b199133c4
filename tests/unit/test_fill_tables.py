import pytest

from tools.fill_tables import BLOCKS, README, ROOT, figures, filled, records_in

TEXT = "a\n<!-- t:begin -->\nold\n<!-- t:end -->\nb\n"


def test_only_the_text_between_the_markers_changes() -> None:
    once = filled(TEXT, "t", "| new |\n")
    assert once == "a\n<!-- t:begin -->\n| new |\n<!-- t:end -->\nb\n"
    assert filled(once, "t", "| new |") == once


def test_missing_markers_raise() -> None:
    with pytest.raises(ValueError, match="<!-- other:begin -->"):
        filled(TEXT, "other", "x")


@pytest.mark.parametrize("which", BLOCKS)
def test_every_page_has_its_block(which: str) -> None:
    page, name = BLOCKS[which]
    assert "MARK" in filled(page.read_text(encoding="utf-8"), name, "MARK")


def test_the_readme_has_the_figures_of_the_last_benchmark() -> None:
    readme = README.read_text(encoding="utf-8")
    assert filled(readme, "figures", figures(records_in(ROOT / "benchmarks" / "results"))) == readme


def test_the_first_screen_has_what_one_needs_first() -> None:
    """Its 25 lines; the marker after them is not shown."""
    *lines, end = README.read_text(encoding="utf-8").splitlines()[:26]
    first = "\n".join(lines)
    assert end == "<!-- figures:end -->"
    assert all(word in first for word in ("Alpha", "CPU", "retain_graph=True", "coalesce()", "make demo", "make test"))
