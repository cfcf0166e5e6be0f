"""What stands for a rate by its logarithm, and what a network marks as not to decay."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite import Size, UseError, dissect, plan

SIZE = Size(16, 2)
SIGNALS, TOKENS = torch.zeros(2, 8), torch.zeros(1, 8, dtype=torch.long)


class Gated(nn.Module):
    """A decaying sum with a time constant, beside gates, a softmax and a softplus that are none."""

    def __init__(self, width: int, depth: int, mark: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)
        self.gate, self.step, self.smooth = (nn.Linear(width, width) for _ in range(3))
        self.log_rate = nn.Parameter(torch.zeros(width))
        self.positive = nn.Parameter(torch.randn(width, width))
        if mark:
            self.gate.weight._no_weight_decay = True
            self.smooth.weight._optim = {"weight_decay": 0.0, "lr": 1.0}
            self.step.weight._optim = {"weight_decay": 0.1}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = torch.exp(F.softplus(self.step(x)) * -self.log_rate.exp())
        x = kept * x * self.gate(x).sigmoid()
        x = F.softplus(self.smooth(x)) @ F.softplus(self.positive)
        return self.last(x).softmax(-1)


def test_time_constants_are_told_from_gates_and_activations() -> None:
    anatomy = dissect(Gated, SIGNALS, size=SIZE)
    assert {name for name, part in anatomy.items() if part.rate} == {"log_rate", "step.bias", "positive"}


def test_a_rate_does_not_decay_and_the_plan_says_why() -> None:
    made = plan(Gated, SIGNALS, size=Size(32, 2), base=SIZE, lr=1e-3, weight_decay=0.1)
    still = {name for name, row in made.rows.items() if row.weight_decay == 0}
    assert still == {"log_rate", "step.bias", "positive"}
    assert "stands for a rate by its logarithm" in " ".join(str(made.explain("step.bias")).split())


def test_marks_and_names_are_heeded_under_every_policy() -> None:
    build = partial(Gated, mark=True)
    marked = {"gate.weight", "smooth.weight"}
    assert {name for name, part in dissect(build, SIGNALS, size=SIZE).items() if part.undecayed} == marked
    made = plan(
        build,
        SIGNALS,
        size=Size(32, 2),
        base=SIZE,
        lr=1e-3,
        weight_decay=0.1,
        decay="everything",
        no_decay=["*.bias", "last.weight"],
    )
    still = {name for name, row in made.rows.items() if row.weight_decay == 0}
    assert still == marked | {"last.weight"} | {name for name in made.rows if name.endswith("bias")}
    assert "no_decay names it" in " ".join(str(made.explain("last.weight")).split())


def test_patterns_that_cannot_be_meant_are_refused() -> None:
    planned = partial(plan, Gated, SIGNALS, size=SIZE, base=SIZE, lr=1e-3)
    with pytest.raises(UseError, match=r"no_decay: no tensor .* matches 'head\.\*'; there are"):
        planned(no_decay=["head.*"])
    with pytest.raises(UseError, match=r"give a list of patterns, no_decay=\['last\.\*'\]"):
        planned(no_decay="last.*")


@pytest.mark.parametrize(
    ("family", "options", "rates"),
    [
        ("Mamba", {"state_size": 4, "time_step_rank": 4}, {"mixer.A_log", "mixer.dt_proj.bias"}),
        (
            "Mamba2",
            {"state_size": 4, "head_dim": 8, "num_heads": 4, "n_groups": 1, "chunk_size": 4},
            {"mixer.A_log", "mixer.dt_bias"},
        ),
        ("Rwkv", {"context_length": 8}, {"attention.time_decay"}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_time_constants_of_state_space_models(family: str, options: dict, rates: set[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2, "use_cache": False}
    config = getattr(transformers, f"{family}Config")(**sizes, **options)
    anatomy = dissect(getattr(transformers, f"{family}ForCausalLM")(config), TOKENS)
    found = {".".join(name.split(".")[3:]) for name, part in anatomy.items() if part.rate}
    assert found == rates
