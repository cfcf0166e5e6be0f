"""What a plan says about its numbers is true: put the numbers into the formulas, and they come out."""

import math
import re
from dataclasses import replace

import pytest

from theodolite import Part, Size, UseError
from theodolite.optimizers import OPTIMIZERS, Base, Ratios, meet
from theodolite.optimizers.horizon import UNCHANGED, HorizonCase, HorizonFactors
from theodolite.planning.explaining import Derivation, reasons
from theodolite.planning.init_distribution import InitDistribution

from .zoo import BASE, TARGET, zoo_plan

pytestmark = pytest.mark.usefixtures("one_dissection")

COLUMNS = {
    "init": "init",
    "lr": "lr",
    "decay": "weight_decay",
    "eps": "eps",
    "radius": "extent",
    "p": "extent",
}
LACKING = {
    "eps": {name for name, spec in OPTIMIZERS.items() if spec.eps is None},
    "radius": set(OPTIMIZERS) - {"sso"},
    "p": set(OPTIMIZERS) - {"sophia"},
}


def value(text, names):
    """A formula as it is printed, evaluated."""
    text = text.replace("²", "**2").replace("·", "*").replace("^", "**")
    text = re.sub(r"√(\w+)", r"sqrt(\1)", text).replace("√(", "sqrt(")
    return eval(text, {"__builtins__": {}, "sqrt": math.sqrt}, names)


def ratios_of(row):
    return {
        name: value(number, {}) for name, number in re.findall(r"(r_\w+) = ([\d./]+)", row.reasons["sizes"])
    }


def symbols(row):
    """Every symbol a row's reasons define, with its value; each definition is checked on the way."""
    names = ratios_of(row)
    if "α" in row.reasons:
        formula, number = re.match(r"(.*) = ([\d./]+):", row.reasons["α"]).groups()
        assert value(formula, names) == pytest.approx(value(number, names), rel=1e-3)
        names["α"] = value(number, names)
    for column in COLUMNS:
        why = row.reasons.get(column, "").partition("\n")[2]
        for name, chain in re.findall(r"\b([cuwfe]) = ((?:[^,;]|, (?=\d))+?)(?=[,;]|$)", why):
            *formulas, number = chain.split(" = ")
            for formula in formulas:
                assert value(formula, names) == pytest.approx(value(number, names), rel=1e-3), (
                    row.name,
                    chain,
                )
            names[name] = value(number, names)
    names |= {"m_B": 1.0, "m_D": 1.0}  # where it is not said that they change
    for name, ratio in re.findall(r"(m_[BD]) = ([\d./]+):", row.reasons.get("batch and tokens", "")):
        names[name] = value(ratio, {})
    for name, chain in re.findall(r"^([hs]) = ([^:,]+(?:, \d[^:,]*)?)[:,]", row.reasons["lr"], re.MULTILINE):
        *formulas, number = chain.split(" = ")
        for formula in formulas:
            assert value(formula, names) == pytest.approx(value(number, {}), rel=1e-3)
        names[name] = value(number, {})
    return names


@pytest.mark.parametrize(
    "optimizer, covers",
    [
        *((name, "hidden") for name in OPTIMIZERS),
        *((name, "all") for name, spec in OPTIMIZERS.items() if spec.matrices_only),
    ],
)
def test_numbers_put_into_the_formulas_give_the_rows(optimizer, covers):
    beside = {"vector_lr": 2**-9} if OPTIMIZERS[optimizer].matrices_only else {}
    plan = zoo_plan(optimizer=optimizer, covers=covers, eps=1e-5, **beside)
    assert {role for role, column in come_out(plan) if column == "lr"} == ROLES


TRAINED = BASE.at(batch=32, tokens=10**6)


@pytest.mark.parametrize("batch, tokens", [(128, 9 * 10**6), (8, 10**6), (96, None)])
@pytest.mark.parametrize("rule", ["sde", "sde+timescale", "timescale", "power(0.3, 0.5)"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sgd with momentum", "muon", "lion", "shampoo"])
def test_numbers_put_into_the_formulas_for_batch_and_tokens_give_the_rows(optimizer, rule, batch, tokens):
    optimizer, _, momentum = optimizer.partition(" with ")
    given = {"vector_lr": 2**-9} if OPTIMIZERS[optimizer].matrices_only else {}
    given |= {"options": {"momentum": 0.9}} if momentum else {}
    given |= {"horizon": rule, "decay": "independent" if batch == 8 else "paper"}
    plan = zoo_plan(TARGET.at(batch=batch, tokens=tokens), TRAINED, optimizer=optimizer, eps=1e-5, **given)
    assert {role for role, column in come_out(plan) if column == "lr"} == ROLES
    for row in plan.rows.values():
        said = row.reasons["batch and tokens"]
        assert said.endswith(f"by the rule {rule}")
        assert ("m_B" in said, "m_D" in said) == (True, tokens == 9 * 10**6)


def test_averages_that_change_are_explained_with_both_values():
    size = TARGET.at(batch=128)
    plan = zoo_plan(size, TRAINED, horizon="sde", options={"betas": (0.5, 0.25)})
    assert (
        plan["last.bias"].reasons["betas"].startswith("0.5, 0.25 → 0.0625, 0.00390625\naverages keep their")
    )
    assert "of which a step holds 4 times as many" in plan["last.bias"].reasons["betas"]
    muon = zoo_plan(size, TRAINED, horizon="sde", optimizer="muon")
    assert muon["blocks.0.up.weight"].reasons["momentum"].startswith("0.95 → 0.814506\n")
    assert muon["last.bias"].reasons["betas"].startswith("0.9, 0.999 → 0.6561, 0.996006\n")
    for quiet in (zoo_plan(), zoo_plan(size, TRAINED, horizon="power(0, 1)")):
        assert "betas" not in quiet["last.bias"].reasons
    assert "batch and tokens" not in zoo_plan()["last.bias"].reasons


def test_why_the_rate_follows_is_said_in_the_words_of_the_rule():
    size = TARGET.at(batch=128, tokens=64 * 10**6)

    def said(**given):
        return zoo_plan(size, TRAINED, **given)["blocks.0.up.weight"].reasons["lr"].splitlines()

    assert said(horizon="sde")[2:] == ["h = √(m_B/m_D) = 1/4: the random walk of the weights stays"]
    assert said(horizon="sde", optimizer="sgd")[2:] == [
        "h = m_B/√m_D = 1/2: the random walk of the weights stays"
    ]
    assert said(horizon="power(0.5, 1)")[2:] == ["h = m_B^1/m_D^0.5 = 1/2, by the exponents given"]
    assert (
        said(horizon="sde", optimizer="shampoo")[2] == "h = 1: steps of shampoo go as 1/√step by themselves"
    )
    assert len(said(horizon="none")) == len(said(horizon="timescale")) == 2
    summed = said(horizon="sde", optimizer="sgd", options={"momentum": 0.9})[3]
    assert summed == "s = 3.439: momentum sums the gradients of fewer or more steps"
    assert said(horizon="sde", optimizer="muon")[3].endswith(
        ": momentum is normalised, and its steps are less correlated"
    )
    fewer = zoo_plan(TARGET.at(batch=8), TRAINED, horizon="sde", optimizer="muon")
    assert "its steps are more correlated" in fewer["blocks.0.up.weight"].reasons["lr"]


ROLES = {"input", "hidden", "output", "bias", "gain"}


def come_out(plan):
    """Check every formula of a plan; returns the roles and columns with one."""
    optimizer, seen = plan.optimizer_name, set()
    for row in plan.rows.values():
        assert "as the rule" not in str(row.reasons)  # every built-in rule has words of its own
        names = symbols(row)
        at_base = plan.lr if row.rule == optimizer else 2**-9
        names |= {
            "lr": row.lr,
            "η": at_base,
            "λ": plan.weight_decay,
            "ε": plan.eps if row.rule == optimizer else 1e-8,
        }
        for column, field in COLUMNS.items():
            if column not in row.reasons:
                assert row.rule in LACKING[column]
                continue
            truth = getattr(row, field)
            if column == "init":
                truth = truth.mean if truth.kind == "constant" else truth.std
            *formula, result = re.split(" = |: ", row.reasons[column].partition("\n")[0])[:3]
            if formula == ["0"]:  # and then a reason why it is
                formula, result = [], "0"
            assert value(result, {}) == pytest.approx(truth, rel=1e-3), (row.name, column)
            if formula:
                symbolic, numbers = formula
                assert value(numbers, {}) == pytest.approx(truth, rel=2e-3), (row.name, column)
                if column == "init":
                    names["σ"] = names["value"] = float(numbers.split(" · ")[0])
                assert value(symbolic, names) == pytest.approx(truth, rel=3e-3), (row.name, column)
                seen.add((row.role, column))
    return seen


@pytest.mark.parametrize("optimizer", ["adamw", "muon-kimi"])
def test_the_words_are_those_of_the_rule_in_use(optimizer):
    plan = zoo_plan(optimizer=optimizer)
    said = plan["blocks.0.up.weight"].reasons["lr"]
    assert ("each entry of the update is about one" in said) == (optimizer == "adamw")
    assert ("0.2·√max(fan-in, fan-out)" in said) == (optimizer == "muon-kimi")
    assert "each entry of a vector" in plan["first.bias"].reasons["lr"]


def test_decay_policies_are_named():
    gain, weight = "blocks.1.norm_out.weight", "blocks.1.up.weight"
    for policy in ("paper", "independent"):
        assert zoo_plan(decay=policy)[gain].reasons["decay"] == "0: the gain of an Output-Norm never decays"
    assert "nothing decays" in zoo_plan(decay="none")[weight].reasons["decay"]
    spared = zoo_plan(decay="matrices")
    for name in (gain, "blocks.1.norm_in.weight", "first.bias"):
        assert spared[name].reasons["decay"] == f"0: the policy is that no {spared[name].role} decays"
    assert spared[weight].reasons["decay"] == zoo_plan()[weight].reasons["decay"]
    assert spared[weight].weight_decay > spared[gain].weight_decay == 0
    everything = zoo_plan(decay="everything")
    assert everything[gain].reasons["decay"].startswith("λ · u/w · 1/α = 0.1 · 1 · 3 = 0.3")
    assert all(row.weight_decay > 0 for row in everything.rows.values())
    row = zoo_plan(decay="independent")[weight]
    left, numbers, result = row.reasons["decay"].partition("\n")[0].split(" = ")
    assert left == "λ / lr"
    assert value(numbers, {}) == pytest.approx(row.weight_decay, rel=1e-3)
    assert float(result) * row.lr == pytest.approx(0.1, rel=1e-3)


def test_a_rule_of_ones_own_gets_no_words_it_did_not_say():
    def adamw(part, ratios, base):  # the name of a rule, but not what it does
        return meet(part, ratios, base, update=5.0, floor=7.0)

    said = zoo_plan(optimizer=adamw)["blocks.0.up.weight"].reasons
    assert "u = 5: the size of the update, as the rule says" in said["lr"]
    assert said["eps"].endswith("f: as the rule asks")


def test_an_explanation_says_what_the_tensor_is_and_how_much_it_grew():
    said = str(zoo_plan().explain("blocks.4.down.weight"))
    assert "hidden weight of shape 128×384, in block 4, where its branch ends; trained by adamw" in said
    assert "fan-in 384 = 8 × 48" in said
    assert "fan-out 128 = 8 × 16" in said
    assert "residual branches 18 = 3 × 6" in said
    assert "η · c/u · α = 0.01562 · 1/8 · 1/3 = 0.000651" in said
    assert max(map(len, said.splitlines())) <= 100


def test_a_multiplier_that_stays_is_explained():
    table = Part("embed", (9, 64), "embedding", "input", 9, 64, False, True, (0,), (1,))
    base, ratios = Base(lr=0.1), Ratios(fan_out=4)
    hyper = OPTIMIZERS["adamw"].rule(table, ratios, base)
    case = Derivation(
        part=table,
        partner=replace(table, fan_out=16),
        ratios=ratios,
        num_branches=(1, 1),
        rule="adamw",
        policy="paper",
        base=base,
        init=InitDistribution("normal", std=1.0),
        explicit=hyper,
        hyper=hyper,
        horizon=HorizonCase(UNCHANGED, Size(64, 2), Size(64, 2), OPTIMIZERS["adamw"], {}),
        factors=HorizonFactors(),
        readout=0.25,
    )
    assert reasons(case)["multiplier"].startswith("1/4, in the forward pass of the readout")
    assert "multiplier" not in reasons(replace(case, readout=1.0))


def test_a_pattern_will_do_where_all_it_matches_are_alike():
    plan = zoo_plan()
    assert str(plan.explain("blocks.*.up.weight")).splitlines()[0] == (
        "blocks.0.up.weight, and the same for 5 more of blocks.*.up.weight"
    )
    with pytest.raises(UseError, match=r"matches 2 kinds of tensors: blocks.*.up.weight, blocks.*.up.bias"):
        plan.explain("blocks.*.up.*")


@pytest.mark.parametrize(
    "name, words",
    [
        (
            "blocks.0.up.wieght",
            "'blocks.0.up.wieght' is not a tensor of this plan. Did you mean blocks.0.up.",
        ),
        ("last", "Did you mean last.weight or last.bias?"),
        ("qqqq", r"print\(plan\) shows all of them"),
        ("blocks.9.*", "'blocks.9.*' is not a tensor"),
    ],
)
def test_an_unknown_name_is_met_with_near_ones(name, words):
    with pytest.raises(UseError, match=words):
        zoo_plan(size=BASE).explain(name)
