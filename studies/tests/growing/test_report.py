"""Tables and figures of the growing study."""

from theodolite_studies.growing.report import figures, notes

from .tiny import growing_records, grown_records, ranking_records


def test_tables_and_figures_come_from_the_records():
    records = [
        *growing_records(1.0),
        *ranking_records(1),
        *({**one, "part": "envelope"} for one in grown_records()),
    ]
    said = notes(records)
    assert "0,3 1,3" in said
    assert said.count("+1.00 (+1.00 to +1.00)") >= 6
    drawn = dict(figures(records))
    assert set(drawn) == {"curves", "ranking", "envelope"}
    assert all(svg.endswith("</svg>\n") and "nan" not in svg for svg in drawn.values())
