import pytest

from theodolite.core.arguments import parse_number
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.sweeping.ranges import Range, parse_axis, parse_whole_numbers
from theodolite.sweeping.sweep import sizes_of


@pytest.mark.parametrize(
    "text, values",
    [
        ("2^-12:2^-9", [2**-12, 2**-11, 2**-10, 2**-9]),
        ("2^-9:2^-8:0.5", [2**-9, 2**-8.5, 2**-8]),
        ("1e-4:1e-3", [1e-4, 2e-4, 4e-4, 8e-4]),
        ("0.001, 0.003", [0.001, 0.003]),
        ("2^-8", [2**-8]),
        ("1,2^-3:2^-2", [1, 2**-3, 2**-2]),
    ],
)
def test_ranges_go_in_octaves(text, values):
    assert parse_axis(text) == pytest.approx(values)


def test_an_axis_may_hold_words_lists_and_whole_numbers():
    assert parse_axis("paper,none") == ["paper", "none"]
    assert parse_axis("[0.9,0.95],[0.9,0.99]") == [[0.9, 0.95], [0.9, 0.99]]
    assert [type(value) for value in parse_axis("0,10,0.5")] == [int, int, float]
    assert parse_axis("0:0.3:linear") == Range(0.0, 0.3, log=False)


@pytest.mark.parametrize(
    "text, said",
    [
        ("2^-5:2^-12", "from 0.03125 to 0.000244141: write the lower end first"),
        ("2^-7:2^-7", "from 0.0078125 to 0.0078125: for one value, write 2^-7 alone"),
        ("3:3:log", "from 3 to 3: for one value, write 3 alone"),
        ("0:1", "starts at 0, but a range goes in octaves"),
        ("1:2:0", "a step in octaves, above 0"),
        ("1:2:1:1", "a step in octaves, above 0"),
        ("1:2:0.0001", "10001 values: take a longer step"),
        ("1,,2", "empty value"),
        ("", "empty value"),
        ("nan", "'nan' is no finite number"),
        ("1:inf", "'inf' is no finite number"),
        ("2^9999", "'2^9999' is no finite number"),
        ("1:log", "one end"),
        ("0:1:log", "starts at 0, which has no logarithm"),
        ("[0.9", "as JSON writes it"),
        ("fast", "'fast' in 'fast' is no positive whole number"),
        ("0.1:1:log", "a range to search in"),
    ],
)
def test_what_is_no_range_is_refused_with_what_to_write(text, said):
    with pytest.raises(UseError) as refused:
        parse_whole_numbers(text)
    assert said in str(refused.value)


def test_a_negative_base_with_a_broken_exponent_is_no_number():
    with pytest.raises(UseError, match="no finite number"):
        parse_number("-2^0.5")


def test_widths_are_whole_and_positive():
    assert parse_whole_numbers("128:1024") == [128, 256, 512, 1024]
    for text in ("0,2", "2.5", "-4"):
        with pytest.raises(UseError, match="no positive whole number"):
            parse_whole_numbers(text)


def sizes(**given):
    usual = {"sizes": None, "widths": [], "depths": [], "product": False, "base": None, "own": Size(64, 2)}
    return sizes_of(**(usual | given))


def test_sizes_are_lines_through_the_base():
    assert sizes(widths=[8, 16], depths=[2, 4]) == ((Size(8, 2), Size(8, 4), Size(16, 2)), Size(8, 2))
    assert sizes(widths=[8, 16]) == ((Size(8, 2), Size(16, 2)), Size(8, 2))
    assert sizes() == ((Size(64, 2),), Size(64, 2))
    product, _ = sizes(widths=[8, 16], depths=[2, 4], product=True)
    assert len(product) == 4
    product, base = sizes(widths=[8, 16], depths=[2, 4], product=True, base=Size(4, 1))
    assert len(product) == 5  # the base has no line of its own through it
    assert base in product


def test_the_base_is_always_among_the_sizes():
    assert sizes(widths=[8], base=Size(4, 1)) == ((Size(4, 1), Size(8, 1)), Size(4, 1))
    assert sizes(sizes=[Size(8, 2)], base=Size(4, 2))[0] == (Size(4, 2), Size(8, 2))


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(UseError, match="both given"):
        sizes(sizes=[Size(8, 2)], widths=[8])
    with pytest.raises(UseError, match="sizes is empty"):
        sizes(sizes=[])
    with pytest.raises(UseError, match="is no size"):
        sizes(sizes=[(8, 2)])
