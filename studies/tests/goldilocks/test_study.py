"""The Goldilocks study from end to end, on random pixels."""

import dataclasses
import json
import shutil
from collections import Counter
from xml.etree import ElementTree

import pytest
import torch

from theodolite import data
from theodolite.cli import main
from theodolite_studies.framework.study import RECORDS, conduct, read, report, summarise
from theodolite_studies.goldilocks import setting, study
from theodolite_studies.goldilocks.setting import GoldilocksSetting
from theodolite_studies.goldilocks.study import STUDY

TINY = GoldilocksSetting(
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

    def noise(name, split, mean, std):
        generator = torch.Generator().manual_seed(int(split == "train"))
        values = torch.randint(256, (32, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return data.Examples(name, values, torch.arange(32) % 10, 10, mean, std)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("theodolite.data.images._from_idx", noise)
        patch.setattr("theodolite_studies.framework.study.pooled", in_this_process)
        setting._first_images.cache_clear()
        yield
    setting._first_images.cache_clear()


def in_this_process(function, items, jobs, *, said):
    for item in items:
        yield item, function(item)


def conducted(out, *parts, setting=TINY):
    lines = []
    status = conduct(STUDY, out, setting=setting, parts=parts, engine="serial", jobs=1, tell=lines.append)
    assert status == 0
    return lines


@pytest.fixture(scope="module")
def zone(tmp_path_factory):
    """Where the zone was measured."""
    out = tmp_path_factory.mktemp("zone")
    conducted(out, "zone")
    return out


def test_from_end_to_end(zone, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "COURSE_TEMPERATURES", (0.0, 4.0))
    out = tmp_path / "out"
    shutil.copytree(zone, out)
    parts = ("zone", "logits", "temperature", "course")
    assert conducted(out, *parts)[-1].startswith("20/20")
    _, records = read(STUDY, out)
    counts = Counter(record["part"] for record in records)
    # A, B and D with three rows each; D alone; five columns at three temperatures and at two
    assert counts == {"zone": 2 * 9, "logits": 2, "temperature": 2 * 15, "course": 2 * 10}
    before = (out / RECORDS).read_bytes()

    lines = conducted(out, *parts)
    assert [line.partition(" in ")[0] for line in lines] == [
        "8 of 8 cells are",
        "temperature: 60 runs, 0 of them to make",
        "20 of 20 cells are",
    ]
    assert (out / RECORDS).read_bytes() == before

    summary = tmp_path / "goldilocks.jsonl"
    summarise(STUDY, out, summary)
    said = report(STUDY, summary)
    assert "A: flat under joint scaling, T = α^L" in said
    for name in ("zone", "parts", "saturation", "logits", "course", "temperature"):
        ElementTree.parse(tmp_path / f"goldilocks-{name}.svg")
    drawn = ElementTree.parse(tmp_path / "goldilocks-temperature.svg")
    cells = [each for each in drawn.iter("{http://www.w3.org/2000/svg}rect") if each.get("width") == "15"]
    assert len(cells) == 2 * 5 * 3 * 2  # train and test, columns, temperatures, rates
    assert report(STUDY, out).splitlines()[:-1] == said.splitlines()[:-1]


def test_a_killed_measurement_loses_its_last_cell_at_most(zone, tmp_path):
    whole = (zone / RECORDS).read_text()
    (tmp_path / RECORDS).write_text(whole[: len(whole) - 100])
    lines = conducted(tmp_path, "zone")
    assert lines[0] == f"5 of 6 cells are in {tmp_path / RECORDS}"
    assert (tmp_path / RECORDS).read_text() == whole


def test_seeds_may_be_added_and_other_settings_are_refused(tmp_path):
    conducted(tmp_path, "logits", setting=dataclasses.replace(TINY, seeds=(0,)))
    assert conducted(tmp_path, "logits")[0].startswith("1 of 2 cells")
    with pytest.raises(ValueError, match="was made with other settings"):
        conducted(tmp_path, "logits", setting=dataclasses.replace(TINY, points=5))


def test_a_summary_keeps_what_other_machines_found(tmp_path):
    summary = tmp_path / "all.jsonl"
    for part in ("logits", "neighbours"):
        conducted(tmp_path / part, part)
        summarise(STUDY, tmp_path / part, summary)
    _, records = read(STUDY, summary)
    assert {record["part"] for record in records} == {"logits", "neighbours"}
    again = summary.read_text()
    summarise(STUDY, tmp_path / "logits", summary)
    assert summary.read_text() == again
    about, *rest = again.splitlines()
    summary.write_text("\n".join([json.dumps({**json.loads(about), "epochs": 3}), *rest, ""]))
    with pytest.raises(ValueError, match="another setting of the study"):
        summarise(STUDY, tmp_path / "logits", summary)


def test_numbers_in_the_file_are_short(zone):
    _, records = read(STUDY, zone)
    values = [value for record in records for value in record["frobenius"]]
    assert values
    assert values == [float(f"{value:.4e}") for value in values]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--part", "zones"], "the study has no part 'zones': it has zone, logits"),
        (["--set", "precision=half"], "precision is 'half'"),
        (["--set", "epochs=few"], "epochs is 1000 by default; give values of that type"),
        (["--set", "epoch=3"], "the setting has no field 'epoch': it has networks, points"),
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
    with pytest.raises(ValueError, match="no file of the study 'goldilocks'"):
        report(STUDY, tmp_path / "other.jsonl")
    (tmp_path / "odd.jsonl").write_text('{"study":"goldilocks"}\n{"seed":0}\n')
    with pytest.raises(ValueError, match="no records of the goldilocks study"):
        report(STUDY, tmp_path / "odd.jsonl")
