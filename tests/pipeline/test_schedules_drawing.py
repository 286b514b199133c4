"""Drawings in the terminal and as SVG, and the command line that makes them."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from retrograde.cli import main
from retrograde.pipeline import Costs, Schedule, Timed, Timeline, check, generate, simulate
from retrograde.pipeline.drawing import COLOURS, draw, from_trace
from retrograde.pipeline.schedule import ActionKind
from retrograde.pipeline.svg import svg

SVG = "{http://www.w3.org/2000/svg}"

ZB_H1 = """\
zb-h1
rank from 0                      idle   peak
   0  F0 F1··· I0 W0 F2 I1 W1 I2 W2      10%      2
   1 ··· F0 I0 F1 I1 W0 F2 I2 W1 W2      10%      2
 F  forward   I  input gradients   W  weight gradients  · idle
bubble 11.1% of the work (11.1% for a single step), makespan 10, peak activations 2 microbatches
"""


def terminal(timeline: Timeline, width: int, title: str = "zb-h1") -> str:
    console = Console(width=width, no_color=True, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(draw(timeline, title, width))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def squeezed(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_terminal() -> None:
    assert squeezed(terminal(simulate(generate("zb-h1", 2, 3)), 100)) == squeezed(ZB_H1)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b"])
def test_it_keeps_to_the_width_and_shows_every_action(name: str, width: int) -> None:
    text = terminal(simulate(generate(name, 4, 6)), width, "title")
    assert max(map(len, text.splitlines())) <= width
    if width >= 80:  # 60 columns have no place for labels of all 144 actions
        rows = [line for line in text.splitlines() if re.match(r" +[0-3] ", line)]
        drawn = re.findall(r"[FIWBfiwb]\d", " ".join(rows).replace("·", " "))
        assert len(drawn) == sum(len(actions) for actions in generate(name, 4, 6).ranks)


def test_later_stages_are_lower_case_in_the_terminal() -> None:
    row = terminal(simulate(generate("zb-v", 2, 3)), 120).splitlines()[2]
    assert re.findall(r"[FIWfiw]\d", row)[:8] == ["F0", "F1", "F2", "f0", "i0", "w0", "f1", "i1"]


def boxes(text: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(text)
    return [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]


def test_svg_boxes_are_the_timeline_to_scale() -> None:
    timeline = simulate(generate("zb-v", 4, 8), Costs(transfer=0.5))
    found = {
        (box.findtext(f"{SVG}title") or "").split(":")[0]: (float(box.attrib["x"]), float(box.attrib["width"]))
        for box in boxes(svg([("zb-v", timeline)]))
    }
    assert set(found) == {str(item.action) for item in timeline.timed}
    zero, unit = found["0F0"]
    for item in timeline.timed:  # coordinates are written with two decimals
        x, width = found[str(item.action)]
        assert x == pytest.approx(zero + item.start * unit, abs=0.02 * item.start + 0.02)
        assert width == pytest.approx((item.end - item.start) * unit, abs=0.02)


def test_svg_stays_on_its_canvas_with_axis_legend_and_figures() -> None:
    timeline = simulate(generate("zb-v", 4, 8))
    root = ElementTree.fromstring(svg([("a <title> & more", timeline)]))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        if box.attrib["width"] != "100%":
            assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
            assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert "a <title> & more" in texts
    assert {"F: forward", "I: input gradients", "W: weight gradients"} <= set(texts)
    assert {"0", "5", "50"} <= set(texts)  # the axis to 51
    assert texts.count("6%") == 4 and [f"rank {rank}" in texts for rank in range(4)] == [True] * 4
    assert {box.attrib["fill"] for box in boxes(svg([("", timeline)]))} == {
        shade for kind in (ActionKind.F, ActionKind.I, ActionKind.W) for shade in COLOURS[kind]
    }


def test_a_trace_is_drawn_beside_its_plan_on_one_scale() -> None:
    plan = simulate(generate("1f1b", 2, 2))
    late = [Timed(item.rank, item.action, 100 + 2 * item.start, 100 + 2 * item.end) for item in reversed(plan.timed)]
    trace = from_trace(late)
    assert trace.start == 0 and trace.makespan == 2 * plan.makespan and trace.bubble == plan.bubble
    assert trace.activations == plan.activations
    widths = [float(box.attrib["width"]) for box in boxes(svg([("plan", plan), ("measured", trace)]))]
    half = len(widths) // 2
    assert sum(widths[half:]) == pytest.approx(2 * sum(widths[:half]), abs=0.02 * half)
    assert "bubble 50.0%" in terminal(trace, 100)


def test_nothing_measured_is_an_empty_drawing() -> None:
    assert from_trace([]).makespan == 0
    assert boxes(svg([])) == []


def test_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "zb-v.svg"
    assert main(["schedules", "show", "zb-v", "--stages", "4", "--microbatches", "8", "--svg", str(file)]) == 0
    said = capsys.readouterr().out
    assert "zb-v: 4 stages on 2 ranks, 8 microbatches" in said
    assert "bubble 0.0% of the work (2.1% for a single step), makespan 24.5, peak activations 2 microbatches" in (
        " ".join(said.split())
    )
    assert len(boxes(file.read_text(encoding="utf-8"))) == 4 * 8 * 3


def test_text_goes_out_and_comes_back_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["schedules", "show", "v-half", "--ranks", "3", "--microbatches", "5", "--lowered"]) == 0
    text = capsys.readouterr().out
    check(Schedule.parse(text))
    assert "SEND_F" in text and "GATHER" in text and "REDUCE" in text
    file = tmp_path / "mine.txt"
    file.write_text(text, encoding="utf-8")
    assert main(["schedules", "show", str(file), "--text"]) == 0
    assert capsys.readouterr().out == text


def test_auto_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedules", "show", "auto", "--ranks", "2", "--microbatches", "3", "--limit", "2", "--text"]) == 0
    assert capsys.readouterr().out.startswith("schedule auto microbatches=3 ")
    assert main(["schedules", "list", "--ranks", "4", "--microbatches", "8"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"zb-v +8 +0.0% +6.2% +4 ", said) and re.search(r"1f1b +4 +37.5% +37.5% +4 ", said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zb-w"], "'zb-w' is not known; give one of gpipe, 1f1b"),
        (["zb-v", "--stages", "5"], "--stages 5 is not a multiple of 2"),
        (["zb-v", "--microbatches", "0"], "microbatches=0 must be at least 1"),
        (["auto", "--stages", "4"], "give --ranks instead of --stages"),
        (["1f1b", "--forward", "-1"], "forward=-1.0 is negative"),
        (["1f1b", "--svg", "/no/such/folder/x.svg"], "No such file or directory"),
    ],
)
def test_faults_are_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedules", "show", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("retrograde: ") and message in said.err and said.out == ""


def test_a_file_with_a_rank_that_has_no_stage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("schedule mine microbatches=1 placement=0,2\nrank 0: 0F0 0B0\nrank 1:\nrank 2: 1F0 1B0\n")
    assert main(["schedules", "show", str(file)]) == 2
    assert "placement (0, 2) does not give each of 3 ranks a stage" in capsys.readouterr().err


def test_the_module_runs() -> None:
    command = [sys.executable, "-m", "retrograde", "schedules", "show", "1f1b", "--ranks", "2", "--microbatches", "1"]
    done = subprocess.run([*command, "--text"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[1:] == ["rank 0: 0F0 0B0", "rank 1: 1F0 1B0"]
