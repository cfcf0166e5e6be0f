import torch
from torch import nn

from theodolite import survey
from theodolite.surveying import SurveyContext
from theodolite.surveying.sections.anatomy import everything_ruled, tied_head


def test_an_untied_head_is_in_order_and_named(gpt):
    site = SurveyContext(gpt(), gpt().size)
    finding = tied_head(site.anatomy)
    assert finding.level == "ok"
    assert "readout.weight 32 × 64" in finding.sentence


def test_a_tied_head_is_noted_with_both_names_and_its_share(gpt):
    site = SurveyContext(gpt(tied=True), gpt().size)
    finding = tied_head(site.anatomy)
    assert (finding.code, finding.level) == ("TH101", "note")
    assert "embed.weight 32 × 64" in finding.sentence
    assert "readout.weight" in finding.sentence
    share = round(100 * 32 * 64 / site.anatomy.num_parameters)
    assert f"{share} %" in finding.sentence


def test_roles_add_up_to_the_network(gpt):
    site = SurveyContext(gpt(bias=True), gpt().size)
    rows = everything_ruled(site.anatomy).evidence.rows
    built = site.build()
    assert {row["role"] for row in rows} == {"input", "hidden", "output", "bias", "gain"}
    assert sum(row["tensors"] for row in rows) == len(list(built.parameters()))
    assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in built.parameters())


class Odd(nn.Module):
    """Holds a tensor whose role its use does not tell."""

    def __init__(self, width, depth):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
        self.idle = nn.Parameter(torch.zeros(3, 5))

    def forward(self, x):
        return torch.maximum(self.last(self.first(x).relu()), self.idle.sum() - 9)


def test_a_tensor_outside_every_rule_fails_once_and_the_survey_goes_on(rows):
    made = survey(rows(Odd))
    # These sections need no roles.
    ruled = [one for one in made.findings if one.section not in ("curvature", "steps", "noise")]
    (finding,) = ruled
    assert (finding.code, finding.level) == ("TH107", "fail")
    assert "idle has shape (3, 5)" in finding.sentence
    assert made.anatomy is None
    assert made.verdict == "mine cannot be scaled as it is: parameters outside any rule (TH107)."


def test_saying_what_it_is_mends_it(rows):
    made = survey(rows(Odd), roles={"idle": "bias"})
    assert made.anatomy is not None
    assert made.anatomy["idle"].role == "bias"
    assert not made.at("fail")


class Twins(nn.Module):
    """Two embeddings that share their tensor, and a head of its own."""

    def __init__(self, width, depth):
        super().__init__()
        self.source, self.target = nn.Embedding(16, width), nn.Embedding(16, width)
        self.target.weight = self.source.weight
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, tokens):
        return self.head(self.source(tokens) + self.target(tokens.flip(1)))


def test_two_embeddings_that_share_a_tensor_are_no_tied_head(rows):
    def batch(seed, step):
        tokens = torch.arange(8).reshape(2, 4)
        return tokens, tokens

    workload = rows(Twins, batch=batch)
    finding = tied_head(SurveyContext(workload, workload.size).anatomy)
    assert finding.sentence.startswith("1 tensor is used in more than one place (source.weight), but none")


def test_one_tensor_is_one_tensor(rows):
    workload = rows(lambda width, depth: nn.Linear(8, width, bias=False))
    finding = everything_ruled(SurveyContext(workload, workload.size).anatomy)
    assert finding.sentence == "The only tensor (256 parameters) has a role that a rule covers."
