import json
import math

import pytest

from theodolite.surveying import Evidence, Finding


def finding(**changes):
    return Finding(**{"code": "TH104", "level": "warn", "title": "t", "sentence": "s", "why": "w"} | changes)


def test_a_finding_names_its_page_by_its_code():
    assert finding(code="TH105").documentation == "docs/findings/TH105.md"


@pytest.mark.parametrize("code", ["TH1", "TH1045", "XX104", "th104", ""])
def test_a_code_is_th_and_three_digits(code):
    with pytest.raises(ValueError, match="TH and three digits"):
        finding(code=code)


def test_a_level_is_one_of_five():
    with pytest.raises(ValueError, match="ok, error, note, warn, fail, not 'grave'"):
        finding(level="grave")


def test_what_is_not_finite_survives_strict_json():
    one = finding(evidence=Evidence({"a": math.nan, "b": 0.5}, ({"c": -math.inf},)))
    evidence = json.loads(json.dumps(one.to_dict(), allow_nan=False))["evidence"]
    assert evidence["numbers"] == {"a": "nan", "b": 0.5}
    assert evidence["rows"] == [{"c": "-inf"}]
