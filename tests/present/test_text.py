"""Tables and numbers, against what a reader expects to see."""

from __future__ import annotations

import csv
import io
import math

import pytest

from theodolite.present.text import Column, Table, number, wrapped

TENSORS = [("blocks.0.attention.out.weight", 0.1, 3), ("head", 12345.678, None)]


def test_words_are_flush_left_and_numbers_flush_right() -> None:
    heads, rule, first, second = Table(("tensor", "lr", "block"), TENSORS).text(100).splitlines()
    assert heads.startswith("tensor ")
    assert first.endswith("0.1      3")
    assert second.startswith("head ")
    assert second.endswith("1.235e+04")
    assert set(rule) == {"─"}


def test_a_table_that_is_too_wide_wraps_names_at_their_dots_and_loses_no_character() -> None:
    text = Table(("tensor", "lr", "block"), TENSORS).text(36)
    assert max(map(len, text.splitlines())) <= 36
    first = "".join(line.split("  ")[0].strip() for line in text.splitlines()[2:-1])
    assert first == TENSORS[0][0]
    assert "blocks.0." in text


def test_numbers_never_give_way_to_a_narrow_terminal() -> None:
    text = Table(("a", "b"), [(1.0, 123456789.25)]).text(4)
    assert "1.235e+08" in text


def test_a_column_without_values_is_left_out_but_not_of_the_csv() -> None:
    table = Table(("tensor", "eps"), [("w", None), ("b", math.nan)])
    assert "eps" not in table.text()
    assert "eps" not in table.html()
    assert table.csv().splitlines()[0] == "tensor,eps"


def test_csv_keeps_all_digits_and_quotes_commas() -> None:
    rows = list(csv.reader(io.StringIO(Table(("x, y", "lr"), [("a, b", 1 / 3)]).csv())))
    assert rows == [["x, y", "lr"], ["a, b", repr(1 / 3)]]


def test_html_escapes_names_and_marks_numbers() -> None:
    html = Table(("<b>", Column("n", side="right")), [("<script>", "1")]).html()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert html.count('class="number"') == 2


def test_a_row_of_another_length_is_a_fault() -> None:
    with pytest.raises(ValueError, match="a row of 1 values under 2 columns"):
        Table(("a", "b"), [(1,)])


@pytest.mark.parametrize("value", [0.1234567, 12.34567, 1e-9, -3.25, 99999.0, 1e6])
def test_a_number_is_what_it_says_to_three_digits(value: float) -> None:
    assert float(number(value)) == pytest.approx(value, rel=5e-3)


def test_a_paragraph_keeps_its_words() -> None:
    text = "one two three four five six"
    assert wrapped(text, 12, indent="  ").split() == text.split()
