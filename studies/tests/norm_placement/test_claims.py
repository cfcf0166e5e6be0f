"""The claims of the study of norm placements, on records whose verdict is known."""

import pytest

from theodolite.core.errors import UseError
from theodolite.core.files import write_whole
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report
from theodolite_studies.norm_placement.runs import RunTable
from theodolite_studies.norm_placement.study import STUDY

from .made_up import ideal, of


def verdicts(records):
    return {each.statement: each.verdict for each in STUDY.decide(records)}


def test_a_world_as_the_paper_has_it_meets_all_claims():
    found = verdicts(ideal())
    assert len(found) == 22
    assert [claim for claim, verdict in found.items() if verdict != "holds"] == []


def test_a_world_in_which_peri_is_worse_fails_where_it_should():
    found = verdicts(ideal(peri_gain=0.05))
    assert found["each at its best, peri ends better than pre"] == "fails"
    assert found["training makes pre's variance grow"] == "holds"


def test_differences_within_noise_are_unclear():
    records = ideal(peri_gain=0.0)
    for record in records:
        if record["placement"] == "peri" and record["held_out"] is not None:
            record["held_out"] += (-1) ** record["seed"] * 0.01
    assert verdicts(records)["each at its best, peri ends better than pre"] == "unclear"


def test_a_plan_that_does_nothing_is_seen():
    found = verdicts(ideal(plan_helps=False))
    assert found["with the plan post's gradients do not vanish"] == "fails"
    assert found["with the plan the placements end closer together"] != "holds"


def test_a_network_that_died_before_the_end_is_unclear_and_no_error():
    records = ideal()
    for record in records:
        is_one = (record["placement"], record["depth"], record["seed"]) == ("pre", 16, 1)
        if is_one and "stream" in record:
            record["stream"]["9"] = [None] * 17
            del record["gradient"]["9"], record["peak"]["9"]
            record["held_out"] = record["unrest"] = None
    found = verdicts(records)
    assert found["training makes pre's variance grow"] == "unclear"
    assert found["at the start post's gradients vanish"] == "holds"


ON_POST = (
    "post trains at fewer learning rates than pre",
    "and pre better than post",
    "with the plan the placements end closer together",
)


def test_what_rests_on_a_network_that_learns_at_no_learning_rate_tried_is_unclear():
    """Its best is chance, and what it does below the lowest is not known."""
    records = ideal()
    for record in of(records, "post"):
        record["held_out"] = 3.5 + 0.001 * ((record["lr"] + record["seed"]) % 3)
    found = {each.statement: each for each in STUDY.decide(records)}
    assert [name for name, each in found.items() if each.verdict != "holds"] == list(ON_POST)
    for name in ON_POST:
        assert "depth 16: post learns at no rate tried" in found[name].here
    text = STUDY.notes(RunTable(records))
    assert "(post learns at no rate tried)" in text
    assert text.count("!") == 2  # in the heading and in one row


def test_a_learning_rate_at_which_it_learns_below_the_others_decides_again():
    """Records without it stay valid."""
    records = ideal()
    for record in of(records, "post"):
        record["held_out"] = 3.5
        if record["lr"] in (-9, -8, -7):
            loss = 2.4 + 0.1 * (record["lr"] + 8) ** 2
            records.append({**record, "lr": record["lr"] - 3, "held_out": loss, "stream": None})
    found = verdicts(records)
    assert [name for name, verdict in found.items() if verdict != "holds"] == []


@pytest.mark.parametrize("kept", [(-9, -8, -7), (-7, -6, -5, -4)])
def test_what_rests_on_a_best_at_an_edge_is_unclear(kept):
    records = [one for one in ideal() if one["lr"] in kept]
    found = {each.statement: each for each in STUDY.decide(records)}
    assert found["each at its best, peri ends better than pre"].verdict == "unclear"
    assert "peri, pre best at an edge" in found["each at its best, peri ends better than pre"].here
    assert found["with the plan the best learning rate stays, wherever the norms are"].verdict == "unclear"
    assert found["training makes pre's variance grow"].verdict == "holds"
    assert "2^-7 !" in STUDY.notes(RunTable(records))


@pytest.mark.parametrize("kept", [(-8, -7, -6, -5, -4), (-9, -8, -7, -6)])
def test_a_range_that_goes_on_past_what_was_tried_is_not_counted(kept):
    records = [one for one in ideal() if one["lr"] in kept]
    found = {each.statement: each for each in STUDY.decide(records)}
    assert found["peri at no fewer than pre"].verdict == "unclear"
    assert "peri, pre up to an edge" in found["peri at no fewer than pre"].here
    assert found["each at its best, peri ends better than pre"].verdict == "holds"


@pytest.mark.parametrize("lost", [{"seed": 2}, {"seed": 2, "lr": -6}, {"lr": -6}])
def test_placements_of_different_seeds_or_learning_rates_are_not_compared(lost):
    gone = [one for one in of(ideal(), "peri") if all(one[key] == value for key, value in lost.items())]
    records = [one for one in ideal() if one not in gone]
    found = {each.statement: each for each in STUDY.decide(records)}
    doubted = found["each at its best, peri ends better than pre"]
    assert doubted.verdict == "unclear"
    assert "not the same seeds and learning rates" in doubted.here
    assert found["and pre better than post"].verdict == "holds"
    assert "peri − pre × 16 standard" in STUDY.notes(RunTable(records))


def test_a_seed_that_diverged_at_every_learning_rate_settles_nothing():
    records = ideal(peri_gain=-0.05)
    for record in of(records, "peri"):
        if record["seed"] == 0:
            record["held_out"] = None
    found = {each.statement: each for each in STUDY.decide(records)}[
        "each at its best, peri ends better than pre"
    ]
    assert (found.here, found.verdict) == ("1 not finite, 1 higher, 2 lower, 3 seeds (depth 16)", "unclear")
    assert RunTable(records).of("peri", 16, "standard").best_at == -7


def test_how_far_the_best_learning_rate_moves_is_one_number_without_a_spread():
    name = "with the plan the best learning rate stays, wherever the norms are"
    assert {each.statement: each.here for each in STUDY.decide(ideal())}[
        name
    ] == "0 octaves (pre 4 to 16, 3 of 3 hold)"
    records = ideal()
    for record in of(records, "peri", "plan"):
        record["lr"] = {-7: -5, -5: -7}.get(record["lr"], record["lr"])
    found = {each.statement: each for each in STUDY.decide(records)}[name]
    assert (found.here, found.verdict) == ("2 octaves (peri 4 to 16, 2 of 3 hold)", "fails")


def test_half_a_study_gives_the_claims_it_can():
    records = [one for one in ideal() if one["depth"] == 16 and one["placement"] != "peri"]
    found = verdicts(records)
    assert found["at the start post's gradients vanish"] == "holds"
    assert "and more than peri's" not in found
    assert "with the plan the best learning rate stays, wherever the norms are" not in found
    assert {name for name, _ in STUDY.figures(RunTable(records))} == {"stream", "gradient", "rates"}
    assert "post − pre × 16 plan" in STUDY.notes(RunTable(records))


def test_the_report_is_drawn_from_the_file(tmp_path):
    file = tmp_path / "norm-placement.jsonl"
    Records(file, {"study": STUDY.name}).append(ideal())
    text = report(STUDY, file)
    assert "22 of 22 claims hold" in text
    assert "peri − pre × 16 standard" in text
    for name in ("stream", "gradient", "rates"):
        assert (tmp_path / f"norm-placement-{name}.svg").read_text().startswith("<svg")


def test_records_of_a_small_study_are_not_mixed_in():
    small = [{**one, "small": True, "held_out": 9.0} for one in ideal()]
    assert verdicts([*ideal(), *small]) == verdicts(ideal())


def test_a_file_of_another_study_is_refused(tmp_path):
    write_whole(tmp_path / "lion.jsonl", '{"study":"lion"}\n{"seed":0}\n')
    with pytest.raises(UseError, match="no file of the study 'norm-placement'"):
        report(STUDY, tmp_path / "lion.jsonl")
