"""What a Fit says: the table, the data, the page, the command."""

import json
import re

import numpy as np
import pytest
import typer

from theodolite import UseError, fits
from theodolite.commands.fit import fit as command

from .worlds import grid, noisy, shaped, surface

FORMS = ["chinchilla", "power", "isoflop", "allocation", "depth-expansion"]


@pytest.fixture(scope="module")
def found():
    n, d = grid()
    return fits.chinchilla(parameters=n, tokens=d, loss=noisy(surface(n, d), 0.003, 0), draws=40)


@pytest.fixture(scope="module")
def every_form():
    x = np.logspace(1, 4, 9)
    width, depth = map(np.ravel, np.meshgrid([64, 96, 128, 192, 256, 384, 512], [2, 4, 8, 12, 16, 24]))
    compute, ratio = map(np.ravel, np.meshgrid([1e18, 1e19, 1e20, 1e21], [0.5, 0.7, 1, 1.4, 2]))
    n, d = grid()
    return {
        "chinchilla": fits.chinchilla(parameters=n, tokens=d, loss=surface(n, d), draws=20),
        "power": fits.power(x=x, loss=2 + 1 / x, draws=20),
        "isoflop": fits.isoflop(
            compute=compute, parameters=ratio * compute**0.5, loss=2 + np.log(ratio) ** 2, draws=20
        ),
        "allocation": fits.allocation(width=width, depth=depth, loss=shaped(width, depth), draws=20),
        "depth-expansion": fits.depth_expansion(depth=[0, *x], loss=[3, *(2 + 1 / (1 + x))], draws=20),
    }


def test_the_table_holds_the_numbers(found):
    text = str(found)
    alpha = found["alpha"]
    assert re.search(rf"α +{alpha.value:.4g} +{alpha.low:.4g} +{alpha.high:.4g} +{alpha.error:.4g}", text)
    assert f"{found.num_reached} of 25 starts" in text
    assert f"{np.abs(found.residuals).max():.2%} at most" in text


@pytest.mark.parametrize("name", FORMS)
def test_a_fit_that_was_saved_says_the_same_when_it_is_loaded(every_form, tmp_path, name):
    fit = every_form[name]
    again = fits.Fit.load(fit.save(tmp_path / "fit.json"))
    assert str(again) == str(fit)
    asked = dict.fromkeys(fit.form.predicts, 1000.0)
    if asked:
        assert again.predict(**asked) == fit.predict(**asked)
    else:
        assert again.optimal(**{fit.form.optimal_at: 1e20}) == fit.optimal(**{fit.form.optimal_at: 1e20})
    np.testing.assert_array_equal(again.residuals, fit.residuals)


def test_a_saved_fit_of_another_law_is_refused(found, tmp_path):
    path = found.save(tmp_path / "fit.json")
    path.write_text(path.read_text().replace("A·N^−α", "A·N^−2"))
    with pytest.raises(UseError, match=r"no form of theodolite\.fits has the equation"):
        fits.Fit.load(path)


def test_the_constants_are_a_table(found, tmp_path):
    lines = found.save(tmp_path / "fit.csv").read_text().splitlines()
    assert lines[0] == "constant,value,2.5 %,97.5 %,error"
    assert lines[4].split(",")[:2] == ["alpha", repr(found["alpha"].value)]


def test_a_prediction_is_that_of_every_draw(found):
    drawn = [
        e + a * 1e11**-alpha + b * 1e13**-beta
        for a, b, e, alpha, beta in zip(
            *(found.samples[k] for k in ("A", "B", "E", "alpha", "beta")), strict=True
        )
    ]
    said = found.predict(parameters=1e11, tokens=1e13)
    assert (said.low, said.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])))
    assert said.low < said.value < said.high


@pytest.mark.parametrize(
    "ask, words",
    [
        (lambda fit: fit["gamma"], "no constant 'gamma'; it has A, B, E"),
        (lambda fit: fit.predict(parameters=1e9), r"write predict\(parameters=…, tokens=…\)"),
        (lambda fit: fit.predict(parameters=-1, tokens=1), r"parameters=-1\): a size must be a positive"),
        (lambda fit: fit.optimal(tokens=1e9), r"write optimal\(compute=…\)"),
        (lambda fit: fit.save("fit.pdf"), "must end in .json or .html or .csv"),
        (lambda fit: fit.save("nowhere/fit.html"), "no folder nowhere"),
    ],
)
def test_what_cannot_be_asked_is_named(found, ask, words):
    with pytest.raises(UseError, match=words):
        ask(found)


def test_a_form_says_what_it_does_not_know():
    x = np.logspace(1, 4, 9)
    with pytest.raises(UseError, match="knows no optimum"):
        fits.power(x=x, loss=2 + 1 / x, draws=20).optimal(x=3)


def test_every_form_has_a_page_with_all_its_points(every_form, tmp_path):
    for name, fit in every_form.items():
        text = fit.save(tmp_path / f"{name}.html").read_text(encoding="utf-8")
        specs = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.S)[1])
        residuals = specs[1][0]["data"][0]["y"]
        np.testing.assert_allclose(residuals, 100 * fit.residuals, rtol=1e-4, atol=1e-12)
        numbers = [
            value for figure in specs for panel in figure for trace in panel["data"] for value in trace["y"]
        ]
        assert np.isfinite(numbers).all(), name
        assert "http://" not in re.sub(r"<script>.*?</script>", "", text, flags=re.S)


def run(arguments, capsys):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    with pytest.raises(SystemExit) as left:
        app(list(map(str, arguments)))
    assert not left.value.code
    return capsys.readouterr().out


@pytest.fixture
def table(tmp_path):
    n, d = grid()
    rows = ["Model Size,Training FLOP,loss"]
    rows += [f"{n_},{6 * n_ * d_},{surface(n_, d_)}" for n_, d_ in zip(n, d, strict=True)]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(rows))
    return path


COLUMNS = ["--columns", "parameters=Model Size,compute=Training FLOP", "--draws", 20]


def test_the_command_prints_constants_and_predictions_and_writes_a_page(table, tmp_path, capsys):
    out = tmp_path / "fit.html"
    asked = ["--at", "compute=1e23", "--at", "parameters=1e9,tokens=1e11", "--out", out]
    text = run([table, *COLUMNS, *asked], capsys)
    assert re.search(r"α +0.35 ", text)
    assert re.search(rf"loss +{surface(1e9, 1e11):.4g}", text)
    assert "at compute 1e+23" in text
    assert out.exists()


def test_the_command_prints_json(table, capsys):
    told = json.loads(run([table, *COLUMNS, "--json", "--at", "compute=1e23"], capsys))
    assert told["constants"]["E"]["value"] == pytest.approx(1.8, rel=1e-4)
    (split,) = told["predictions"]
    assert 6 * split["parameters"]["value"] * split["tokens"]["value"] == pytest.approx(1e23)


def test_the_command_passes_on_the_options_of_each_form(table, capsys):
    text = run([table, "--form", "power", "--columns", "x=Model Size", "--no-offset", "--draws", 20], capsys)
    assert "L = A·x^−α" in text
    assert "5 of the highest loss" in run([table, *COLUMNS, "--drop-worst", 5], capsys)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--columns", "parameters"], "--columns parameters: write NAME=COLUMN"),
        ([*COLUMNS, "--at", "compute=many"], "'many' is no finite number"),
        ([*COLUMNS, "--at", "width=4"], "chinchilla knows --at parameters=…,tokens=… or --at compute=…"),
        ([*COLUMNS, "--budgets", "1e18"], "chinchilla has no option budgets; isoflop has"),
        (["--form", "linear"], "form is 'linear'"),
        ([*COLUMNS, "--out", "fit.txt"], "must end in .html or .json"),
    ],
)
def test_errors_of_the_command_name_the_culprit(table, arguments, words, capsys):
    with pytest.raises(UseError, match=words):
        run([table, *arguments], capsys)
