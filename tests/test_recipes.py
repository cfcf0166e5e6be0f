"""The recipes of CONTRIBUTING.md work: each is followed with the code that stands there, and used."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import theodolite as th
import theodolite_studies
from theodolite import cli, commands, optimizers, workloads
from theodolite.commands import study as studies
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.spec import find_optimizers
from theodolite.surveying import sections
from theodolite_studies.framework import study as framework

from .optimizers import test_every, test_tables
from .test_docs import ROOT, blocks

stream = importlib.import_module("theodolite.probes.stream")  # whose name a function of the probes has
PAGE = ROOT / "CONTRIBUTING.md"
Put = Callable[..., ModuleType]


def recipe(title: str) -> list[str]:
    """The code below a heading."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"### {title}\n")
    end = text.index("\n## ", start)
    after = text.find("\n### ", start, end)
    end = after if after > 0 else end
    return [block.text for block in blocks(PAGE) if start < block.start < end and block.language == "python"]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Put a file, or the two of a study, into a package as a contributor does, and import it."""

    def put(package: ModuleType, name: str, *code: str) -> ModuleType:
        folder = tmp_path / package.__name__
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        files = [f"{name}.py"] if len(code) == 1 else [f"{name}/__init__.py", f"{name}/study.py"]
        for file, text in zip(files, code, strict=True):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return importlib.import_module(f"{package.__name__}.{name}")

    yield put
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            parent, _, child = name.rpartition(".")
            vars(sys.modules.get(parent, module)).pop(child, None)
            del sys.modules[name]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints."""

    def answer(*words: str) -> str:
        cli._commands.cache_clear()
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        out, err = capsys.readouterr()
        assert not left.value.code, err
        return out

    return answer


def test_an_optimizer(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    code, truth = recipe("An optimizer")
    module = put(optimizers, "signum", code)
    find_optimizers.cache_clear()
    found = find_optimizers()["signum"]
    find_optimizers.cache_clear()
    assert found is module.SPECS[0]
    monkeypatch.setitem(OPTIMIZERS, "signum", found)  # type: ignore[misc, arg-type]

    # The file of its truth stands beside the tests of all optimizers, which read it.
    spec = importlib.util.spec_from_loader(f"{test_every.__package__}.test_signum", None)
    assert spec is not None
    beside = importlib.util.module_from_spec(spec)
    exec(compile(truth, "test_signum.py", "exec"), vars(beside))
    for tests in (test_tables, test_every):
        monkeypatch.setattr(tests, "references", lambda: beside.REFERENCES)
    test_tables.test_blocks_of_several_layers("signum", 8.0, 4.0)
    test_tables.test_blocks_of_one_layer("signum", 8.0, 4.0)
    test_every.test_resuming_is_as_if_nothing_had_happened("signum")
    test_every.test_sparse_gradients_are_refused_before_anything_moves("signum")


def test_a_section(put: Put) -> None:
    (code,) = recipe("A survey section and its finding")
    put(sections, "first_loss", code)
    (finding,) = th.survey("mlp-mixture", only=["first_loss"]).findings
    assert (finding.code, finding.level, finding.section) == ("TH199", "ok", "first_loss")
    assert 1 < float(str(finding.evidence.numbers["loss"])) < 10  # ln 10 is guessing


def test_a_probe(put: Put, tmp_path: Path) -> None:
    (code,) = recipe("A probe")
    module = put(stream, "gradient_norms", code)
    model, batch = nn.Linear(3, 2, bias=False), (torch.ones(1, 3), torch.zeros(1, 2))
    found = module.gradient_norms(model, nn.functional.mse_loss, batch)
    gradient = model(batch[0]).T @ batch[0]  # of the mean over two outputs
    assert found.norms["weight"] == pytest.approx(gradient.norm().item())
    assert module.GradientNorms.load(found.save(tmp_path / "norms.json")) == found
    for suffix in ("html", "csv"):
        assert "weight" in found.save(tmp_path / f"norms.{suffix}").read_text()


def test_a_study(
    put: Put, answer: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(theodolite_studies, "averages", *recipe("A study"))
    entry = EntryPoint("averages", "theodolite_studies.averages:command", studies.GROUP)
    assert f'{entry.name} = "{entry.value}"' in PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(studies, "entry_points", lambda group: [entry])
    # Here, and not in processes, which would look for the study in its own folder.
    monkeypatch.setattr(framework, "pooled", lambda run, cells, *_, **__: ((one, run(one)) for one in cells))
    monkeypatch.chdir(tmp_path)
    assert "proportional to 1/√n" in answer("study", "--help")
    assert "1 of 1 claims holds" in answer("study", "averages", "--small")
    assert len((tmp_path / "averages" / "records.jsonl").read_text().splitlines()) == 1 + 3 * 3


def test_a_workload(put: Put) -> None:
    put(workloads, "majority", *recipe("A workload"))
    found = th.workload("mlp-majority")
    inputs, targets = found.draw(0, 0)
    assert torch.equal((inputs.sum(1) > 0).long(), targets)
    assert found.evaluate(found.build(16, 1), (inputs, targets)).isfinite()


def test_a_command(put: Put, answer: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = put(commands, "count", *recipe("A command"))
    monkeypatch.setattr(cli.app, "registered_commands", [*cli.app.registered_commands])
    cli.app.command()(module.count)
    assert "How many parameters does a network have?" in answer("count", "--help")
    # Weights of the first layer, two for each of two blocks, and the last; there are no biases.
    counted = 32 * 64 + 2 * 2 * 64 * 64 + 64 * 10
    assert answer("count", "mlp-mixture", "--depth", "2") == f"{counted:,} parameters\n"
