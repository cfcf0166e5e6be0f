"""The records of norm placements as arrays."""

from theodolite_studies.norm_placement.runs import RunTable

from .made_up import ideal, of


def test_a_network_that_fails_at_all_learning_rates_alike_does_not_count_as_stable():
    """All of them are near its own best, and far from what others reach."""
    records = [one for one in ideal() if one["parameterization"] != "plan"]
    for record in records:
        if record["placement"] == "post":
            record["held_out"] = 3.0
    reach = RunTable(records).of("post", 16, "standard").reach
    assert reach.tolist() == [0, 0, 0]


def test_a_learning_rate_at_which_a_seed_diverged_is_not_the_best():
    records = ideal()
    for record in of(records, "peri"):
        if record["seed"] == 2 and record["lr"] == -7:
            record["held_out"] = None
    assert RunTable(records).of("peri", 16, "standard").best_at == -6


def test_the_slope_starts_after_the_first_block():
    records = ideal()
    for record in of(records, "pre"):
        if "gradient" in record:
            record["gradient"]["0"] = [50.0, 6.0, *[1.0] * 14, 2.0]
    assert RunTable(records).of("pre", 16, "standard").slope("first").tolist() == [3.0] * 3
