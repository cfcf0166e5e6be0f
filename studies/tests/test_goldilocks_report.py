"""The Goldilocks study from end to end, on random pixels."""

import dataclasses
import json
import shutil
from xml.etree import ElementTree

import pytest
import torch

from theodolite import data
from theodolite.cli import main
from theodolite.fleet.engine import Resources
from theodolite_studies.goldilocks import networks
from theodolite_studies.goldilocks import study as conduct
from theodolite_studies.goldilocks.report import report
from theodolite_studies.goldilocks.setting import Setting
from theodolite_studies.goldilocks.study import RECORDS, make, read, write_summary

TINY = Setting(
    networks=("lenet300-fashion",),
    points=3,
    batch=8,
    directions=4,
    epochs=2,
    images=16,
    tested=8,
    inner=(0,),
    rates=(-2.0, -1.0),
    adam_rates=(-3.0,),
    looks=2,
    seeds=(0, 1),
    precision="float32",
)


@pytest.fixture(scope="module", autouse=True)
def pixels():
    """Fashion-MNIST without Fashion-MNIST."""

    def noise(name, train, mean, std):
        generator = torch.Generator().manual_seed(int(train))
        values = torch.randint(256, (32, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return data.Examples(name, values, torch.arange(32) % 10, 10, mean, std)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("theodolite.data.images._from_idx", noise)
        networks._first_images.cache_clear()
        yield
    networks._first_images.cache_clear()


def conducted(out, *parts, setting=TINY):
    lines = []
    made = make(
        out, setting=setting, parts=parts, engine="serial", means=Resources(jobs=1), tell=lines.append
    )
    return made, lines


@pytest.fixture(scope="module")
def zone(tmp_path_factory):
    """Where the zone was measured."""
    out = tmp_path_factory.mktemp("zone")
    conducted(out, "zone")
    return out


def test_from_end_to_end(zone, tmp_path, monkeypatch):
    monkeypatch.setattr(conduct, "TEMPERATURES", (0.0, 4.0))
    out = tmp_path / "out"
    shutil.copytree(zone, out)
    made, _ = conducted(out, "zone", "logits", "temperature", "course")
    assert made.ok
    _, records = read(out)
    counts = {}
    for record in records:
        counts[record["part"]] = counts.get(record["part"], 0) + 1
    # A, B and D with three rows each; D alone; five columns at three temperatures and at two
    assert counts == {"zone": 2 * 9, "logits": 2, "temperature": 2 * 15, "course": 2 * 10}
    before = (out / RECORDS).read_bytes()

    again, lines = conducted(out, "zone", "logits", "temperature", "course")
    assert (again.before, again.finished) == (made.total, 0)
    assert [line.split(",")[0] for line in lines if "curves" in line] == [
        "zone: 0 curves made",
        "logits: 0 curves made",
        "course: 0 curves made",
    ]
    assert (out / RECORDS).read_bytes() == before

    summary = tmp_path / "goldilocks.jsonl"
    write_summary(out, summary)
    said = report(summary)
    assert "A: flat under joint scaling, T = α^L" in said
    names = ("zone", "parts", "saturation", "logits", "course", "temperature")
    for name in names:
        ElementTree.parse(tmp_path / f"goldilocks-{name}.svg")
    drawn = ElementTree.parse(tmp_path / "goldilocks-temperature.svg")
    cells = [each for each in drawn.iter("{http://www.w3.org/2000/svg}rect") if each.get("width") == "15"]
    assert len(cells) == 2 * 5 * 3 * 2  # train and test, columns, temperatures, rates
    folder = report(out)
    assert folder.splitlines()[:-1] == said.splitlines()[:-1]


def test_a_killed_measurement_loses_its_last_line_at_most(zone, tmp_path):
    whole = (zone / RECORDS).read_text()
    (tmp_path / RECORDS).write_text(whole[: len(whole) - 100])
    _, lines = conducted(tmp_path, "zone")
    assert lines[-1].startswith("zone: 1 curves made, 17 records were there")
    assert (tmp_path / RECORDS).read_text() == whole


def test_seeds_may_be_added_and_other_settings_are_refused(tmp_path):
    conducted(tmp_path, "logits", setting=dataclasses.replace(TINY, seeds=(0,)))
    _, lines = conducted(tmp_path, "logits")
    assert lines[-1].startswith("logits: 1 curves made")
    with pytest.raises(ValueError, match="was made with other settings"):
        conducted(tmp_path, "logits", setting=dataclasses.replace(TINY, points=5))


def test_a_summary_keeps_what_other_machines_found(tmp_path):
    summary = tmp_path / "all.jsonl"
    for part in ("logits", "neighbours"):
        conducted(tmp_path / part, part)
        write_summary(tmp_path / part, summary)
    _, records = read(summary)
    assert {record["part"] for record in records} == {"logits", "neighbours"}
    again = summary.read_text()
    write_summary(tmp_path / "logits", summary)
    assert summary.read_text() == again
    about, *rest = again.splitlines()
    summary.write_text("\n".join([json.dumps({**json.loads(about), "epochs": 3}), *rest, ""]))
    with pytest.raises(ValueError, match="another setting of the study"):
        write_summary(tmp_path / "logits", summary)


def test_numbers_in_the_file_are_short(zone):
    _, records = read(zone)
    values = [value for record in records for value in record["frobenius"]]
    assert values
    assert values == [float(f"{value:.4e}") for value in values]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--part", "zones"], "the study has no part 'zones': it has zone, logits"),
        (["--precision", "half"], "precision is 'half'"),
        (["--draw", "nowhere.jsonl"], "nowhere.jsonl is not there: run the study first"),
    ],
)
def test_what_cannot_be_is_refused(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        main(["study", "goldilocks", *arguments])
    assert stop.value.code
    assert said in capsys.readouterr().err


def test_records_of_another_study_are_refused(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"study":"coordinates"}\n{"seed":0}\n')
    with pytest.raises(ValueError, match="no records of the goldilocks study"):
        report(tmp_path / "other.jsonl")
