"""What agrees on two CPUs passes, what somebody has broken does not."""

from __future__ import annotations

import pytest

from .printed import difference

TABLE = """\
counting at 64 × 4 · 203,328 parameters in 38 tensors

width  loss after 20 steps
──────────────────────────
   64   0.8402  in the interval
  128   0.3899  in the interval
  256  diverges

best 0.0041 (0.0037 to 0.0046 over 2 seeds), gained +0.0135 ± 0.0017
142 (139 to 144), about 5385, converged after 435 products of 9 to 12 layers
25 times lower, reaches from 35 on, ×404 at 10× the width, called 2 times in one pass
slope −0.25, E 2.214 (−0.19 to 0.63), outputs differ by 6.7e-07 (at most 1e-03)
eps 1.25e-09, decay 0.1, lost 0.000 ± 0.003
"""


def changed(old: str, new: str) -> str:
    assert TABLE.count(old) == 1, old
    return TABLE.replace(old, new)


@pytest.mark.parametrize(
    "old, new",
    [
        pytest.param("0.8402", "0.8410", id="a loss in its last digits"),
        pytest.param("0.3899", "0.3965", id="a loss by less than 2 %"),
        pytest.param("0.3899", "0.39", id="a loss with fewer digits"),
        pytest.param("(0.0037 to", "(0.0038 to", id="the end of an interval"),
        pytest.param("(−0.19", "(−0.1", id="the end of an interval about zero"),
        pytest.param("2.214", "2.28", id="a value by less than a tenth of its interval"),
        pytest.param("± 0.0017", "± 0.0019", id="a spread"),
        pytest.param("+0.0135", "+0.0132", id="a mean by a fifth of its spread"),
        pytest.param("6.7e-07", "8.9e-08", id="rounding"),
        pytest.param("6.7e-07", "0.0e+00", id="no rounding"),
        pytest.param("0.000 ± 0.003", "0.001 ± 0.003", id="a mean near zero"),
        pytest.param("25 times", "26 times", id="a ratio"),
        pytest.param("142 (139", "141 (138", id="whole numbers of an interval"),
        pytest.param("about 5385", "about 5400", id="an estimate"),
        pytest.param("435", "433", id="how long an iteration took"),
        pytest.param("from 35 on", "from 36 on", id="a limit"),
        pytest.param("×404", "×411", id="a factor"),
        pytest.param("   64   0.8402", "   64    0.84", id="the padding of a column"),
        pytest.param("──\n", "─────\n", id="the length of a rule"),
    ],
)
def test_what_another_cpu_changes_passes(old: str, new: str) -> None:
    assert difference(TABLE, changed(old, new)) is None


@pytest.mark.parametrize(
    "old, new",
    [
        pytest.param("203,328", "203,329", id="a count by one"),
        pytest.param("38 tensors", "39 tensors", id="a small count by one"),
        pytest.param("  128   0.3899  in the interval\n", "", id="a row that is missing"),
        pytest.param("──\n", "──\n   32   0.9  in the interval\n", id="a row more"),
        pytest.param("0.8402", "0.8842", id="a loss by 5 %"),
        pytest.param("0.8402", "-0.8402", id="a sign"),
        pytest.param("−0.25", "0.25", id="a minus that is gone"),
        pytest.param("0.8402", "nan", id="a nan"),
        pytest.param("diverges", "24.69", id="a number in the place of a word"),
        pytest.param("0.3899", "diverges", id="a word in the place of a number"),
        pytest.param("0.3899", "3.899e-01x", id="letters at a number"),
        pytest.param("0.3899", "0.03899", id="an order of magnitude"),
        pytest.param("(0.0037 to", "(0.0028 to", id="the end of an interval by more than a fifth"),
        pytest.param("×404", "×424", id="a factor by 5 %"),
        pytest.param("10×", "11×", id="a multiple that is chosen"),
        pytest.param("2 times", "3 times", id="how often"),
        pytest.param("142", "149", id="a whole number by more than its interval"),
        pytest.param("9 to 12", "9 to 13", id="a range of counts"),
        pytest.param("435", "485", id="how long an iteration took by 10 %"),
        pytest.param("2.214", "2.414", id="a value by a quarter of its interval"),
        pytest.param("+0.0135", "+0.0128", id="a mean by half its spread"),
        pytest.param("6.7e-07", "6.7e-04", id="more than rounding"),
        pytest.param("1e-03", "1e-02", id="a bound"),
        pytest.param("decay 0.1", "decay 0.2", id="a number of one digit"),
        pytest.param("1.25e-09", "1.35e-09", id="a small number that is not rounding"),
        pytest.param(" in 38 tensors", " of 38 tensors", id="a word"),
        pytest.param("  64   0.8402", "  64   0.3899", id="two rows with one another's numbers"),
        pytest.param("tensors\n\nwidth", "tensors\nwidth", id="a blank line"),
        pytest.param("steps\n──", "steps ──", id="a line break"),
        pytest.param("──\n", "──\n──────\n", id="a second rule"),
        pytest.param("width  loss", "widthloss", id="columns without a blank between them"),
    ],
)
def test_what_a_fault_changes_does_not_pass(old: str, new: str) -> None:
    assert difference(TABLE, changed(old, new)) is not None


def test_rows_in_another_order_do_not_pass() -> None:
    first, second = "   64   0.8402  in the interval\n", "  128   0.3899  in the interval\n"
    assert difference(TABLE, changed(first + second, second + first)) is not None


def test_nothing_and_too_much_do_not_pass() -> None:
    assert difference(TABLE, "") is not None
    assert difference("", TABLE) is not None
    assert difference(TABLE, TABLE + TABLE) is not None


@pytest.mark.parametrize("text", ["float32", "blocks.0.weight", "0.1.0", "2^-2", "TH106", "6fc7f2e36d5192c9"])
def test_digits_in_names_are_not_measured(text: str) -> None:
    for index, sign in enumerate(text):
        if sign.isdigit():
            other = text[:index] + str((int(sign) + 1) % 10) + text[index + 1 :]
            assert difference(text, other) is not None, other


def test_dots_stand_for_anything() -> None:
    said = "24 runs: 16 finished, in ... (serial)\nlr  loss ...\n0.1  0.3805 ...\n"
    printed = "24 runs: 16 finished, in 1.2 s (serial)\nlr  loss  time\n0.1  0.381  3 s\n"
    assert difference(said, printed) is None
    assert difference(said, printed.replace("16", "17")) is not None
    assert difference(said, printed.replace("0.381", "0.481")) is not None
    assert difference("a ... b\n", "a or c\n") is not None
    assert difference("a ... b ... b\n", "a or b\n") is not None


def test_text_may_be_wrapped_elsewhere_at_the_edge_of_the_terminal_alone() -> None:
    full = "it is " * 16
    assert difference(f"{full}10.0\npercent of all\n", f"{full}9.97 percent\nof all\n") is None
    assert difference("it is 10.0\npercent of all\n", "it is 9.97 percent\nof all\n") is not None


def test_a_page_can_ask_for_less() -> None:
    assert difference("gain 0.070\n", "gain 0.061\n") is not None
    assert difference("gain 0.070\n", "gain 0.061\n", tolerance=0.2) is None
    assert difference("gain 0.070 in 3 blocks\n", "gain 0.061 in 2 blocks\n", tolerance=0.2) is not None


def test_the_first_difference_is_told() -> None:
    told = difference(TABLE, changed("0.3899", "0.4899"))
    assert told is not None
    assert "0.3899" in told.partition(" and prints ")[0]
    assert "0.4899" in told.partition(" and prints ")[2]
