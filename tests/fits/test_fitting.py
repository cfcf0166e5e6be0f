"""From files, ledgers and rows."""

import csv

import numpy as np
import pytest

from theodolite import UseError, fits
from theodolite.core.size import Size
from theodolite.fits.fitting import read, select
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import Outcome, Run

ROWS = [
    {"N": 10.0**k, "kind": "plan" if k % 2 else "standard", "loss": 2 + 10 ** (-0.3 * k)}
    for k in range(2, 10)
]


@pytest.fixture
def file(tmp_path):
    def write(rows, name="runs.csv"):
        path = tmp_path / name
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


def test_a_csv_and_a_parquet_file_and_rows_give_the_same_fit(file, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "runs.parquet")
    found = [
        fits.fit("power", source, columns={"x": "N"}, draws=20).to_dict()
        for source in (file(ROWS), tmp_path / "runs.parquet", ROWS)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0]["constants"]["alpha"]["value"] == pytest.approx(0.3, rel=1e-4)


def test_where_keeps_the_rows_with_a_value_also_if_it_is_written_otherwise():
    kept = select(ROWS, ["x", "loss"], columns={"x": "N"}, where={"kind": "plan"})
    assert kept["x"] == [1e3, 1e5, 1e7, 1e9]
    assert select(ROWS, ["x", "loss"], columns={"x": "N"}, where={"N": "1e3"})["x"] == [1000.0]


def test_best_keeps_the_lowest_loss_of_each_size_and_seed():
    rows = [
        {"x": x, "lr": lr, "seed": seed, "loss": 2 + 1 / x + abs(lr - 1) + 0.01 * seed}
        for x in (1, 2)
        for lr in (0.5, 1, 2)
        for seed in (0, 1)
    ]
    kept = select(rows, ["x", "loss"], best=True)
    assert kept == {"x": [1, 1, 2, 2], "loss": [3.0, 3.01, 2.5, 2.51]}


def sweep_rows():
    """Of two parameterizations and learning rates at each depth."""
    return [
        {"depth": depth, "seed": 0, "parameterization": how, "lr": lr, "loss": 2 + 1 / (1 + depth) + lr}
        for depth in (1, 2, 4, 8, 16, 32)
        for how in ("plan", "standard")
        for lr in (2**-10, 2**-8)
    ]


def test_runs_of_one_size_and_seed_that_differ_in_a_setting_are_not_mixed(file):
    options = {"columns": {"x": "depth"}, "draws": 20}
    for source in (sweep_rows(), file(sweep_rows())):
        with pytest.raises(UseError) as refused:
            fits.fit("power", source, **options)
        said = str(refused.value)
        assert "4 runs have depth 1, seed 0, and differ" in said
        assert "parameterization is 'plan', 'standard'; lr is 0.0009765625, 0.00390625" in said
        assert "--best" in said
        # What it proposes works.
        assert "--where parameterization=plan,lr=0.0009765625 " in said
        where = {"parameterization": "plan", "lr": "0.0009765625"}
        assert fits.fit("power", source, where=where, **options).data["x"].size == 6
        assert fits.fit("power", source, best=True, **options).data["x"].size == 6
    with pytest.raises(UseError, match=r"differ: lr is 0\.0009765625, 0\.00390625\."):
        fits.fit("power", sweep_rows(), where={"parameterization": "plan"}, **options)


def test_each_size_may_have_a_learning_rate_of_its_own_and_several_seeds():
    rows = [
        {"depth": depth, "seed": seed, "lr": 0.1 / depth, "loss": 2 + 1 / (1 + depth)}
        for depth in (1, 2, 4, 8, 16, 32)
        for seed in (0, 1)
    ]
    assert select(rows, ["depth", "loss"])["depth"] == [row["depth"] for row in rows]


def test_a_ledger_gives_its_finished_runs_and_their_held_out_loss(tmp_path):
    def run(depth):
        return Run("gpt-sotu", Size(64, depth), lr=0.01, parameterization="standard")

    with Ledger.open(tmp_path, name="depths", spec={}) as ledger:
        for depth in (1, 2, 4, 8, 16, 32):
            ledger.append(Outcome(run(depth), "finished", step=100, held_out=2 + 1 / (1 + depth)))
        ledger.append(Outcome(run(3), "diverged", step=7, held_out=None))
    assert read(tmp_path) == read(tmp_path / "ledger.sqlite")
    fit = fits.fit("depth-expansion", tmp_path, draws=20)
    assert fit.data["depth"].tolist() == [1, 2, 4, 8, 16, 32]
    assert fit["s"].value == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    "form, change, words",
    [
        ("cubic", {}, "form is 'cubic'. It is one of chinchilla, power"),
        ("power", {"columns": {"x": "M"}}, "no column 'M' for x; there are 'N', 'kind', 'loss'"),
        ("power", {"columns": {"y": "N"}}, "no y; it knows x, loss"),
        ("power", {}, 'power needs a column x; there are .*--columns x="…"'),
        ("chinchilla", {"columns": {"parameters": "N"}}, "chinchilla needs a column tokens"),
        ("allocation", {}, "allocation needs a column width"),
        ("power", {"columns": {"x": "kind"}}, "kind is 'standard' in the row"),
        (
            "power",
            {"columns": {"x": "N"}, "where": {"kind": "mup"}},
            "no row is left; kind is 'standard', 'plan'",
        ),
        ("power", {"columns": {"x": "N"}, "where": {"lr": "1"}}, "no column 'lr'"),
        ("power", {"columns": {"x": "N"}, "growth": 1.0}, "power has no option growth; depth-expansion has"),
    ],
)
def test_what_does_not_fit_the_table_is_named(form, change, words):
    with pytest.raises(UseError, match=words):
        fits.fit(form, ROWS, **change)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("missing.csv", None, "there is no file or folder .*missing.csv: give a CSV"),
        ("missing", None, "there is no file or folder .*missing: give .* folder of a ledger"),
        ("runs.txt", b"x", "ends in '.txt'. Rename it"),
        ("empty.csv", b"N,loss\n", "has no rows"),
        ("binary.csv", b"\xff\xfe\x00N", "cannot be read as CSV"),
        ("bad.parquet", b"no parquet", "cannot be read as Parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, words):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UseError, match=words):
        read(tmp_path / name)


GOOD = {"x": np.logspace(1, 6, 8), "loss": 2 + np.logspace(0, -2, 8)}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"loss": None}, "power needs loss"),
        ({"loss": [*GOOD["loss"][:3], np.nan, *GOOD["loss"][4:]]}, "loss of point 4 is nan"),
        ({"loss": [0, *GOOD["loss"][1:]]}, "loss of point 1 is 0: every loss must be a positive number"),
        ({"loss": -GOOD["loss"]}, "loss of point 1 is -3"),
        ({"loss": GOOD["loss"][1:]}, "x has 8, loss has 7"),
        ({"x": ["small"] * 8}, "x holds a value that is not a number"),
        ({"x": [[1.0]] * 8}, "x has 2 dimensions"),
        ({"x": [], "loss": []}, "x is empty"),
        ({"x": [1e6] * 8}, "x is 1e.06 at every point"),
        ({"x": [1, 2, 3], "loss": [3, 2, 1]}, "3 constants and there are 3 points: at least 4"),
        ({"drop_worst": 8}, "drop_worst is 8: of 8 points give 0 to 7"),
        ({"drop_worst": -1}, "drop_worst is -1"),
        ({"draws": 3}, "draws is 3: give at least 20"),
    ],
)
def test_points_that_cannot_be_fitted_are_named(change, words):
    with pytest.raises(UseError, match=words):
        fits.power(**GOOD | change)


def test_chinchilla_needs_two_of_three():
    with pytest.raises(UseError, match=r"two of parameters, tokens and compute .* given parameters"):
        fits.chinchilla(parameters=[1, 2], loss=[1, 2])
    with pytest.raises(UseError, match="parameters of point 1 is 0"):
        fits.chinchilla(parameters=[0, 2], compute=[1, 2], loss=[1, 2])
    with pytest.raises(UseError, match="tokens has 3, compute has 2"):
        fits.chinchilla(tokens=[1, 2, 3], compute=[1, 2], loss=[1, 2])


def test_a_growth_that_is_none_is_refused():
    with pytest.raises(UseError, match="growth is 0"):
        fits.depth_expansion(depth=GOOD["x"], loss=GOOD["loss"], growth=0)
