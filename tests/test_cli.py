import io
import json
import os
import re
import subprocess
import sys

import pytest

import theodolite
from theodolite.cli import app, main

MINE = """
import torch
from torch import nn
from theodolite import Size, Workload

class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for up, down in zip(self.up, self.down):
            x = x + down(up(x).relu())
        return self.last(x)

class Idle(Net):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.idle = nn.Parameter(torch.zeros(3, 5))

    def forward(self, x):
        return torch.maximum(super().forward(x), self.idle.sum() - 9)

class Chatty(Net):
    def __init__(self, width, depth):
        print("building")
        super().__init__(width, depth)

    def forward(self, x):
        print("called")
        return super().forward(x)

def batch(seed, step):
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed + step))
    return inputs, (inputs.sum(1) > 0).long()

def broken(width, depth):
    raise KeyError("no such layer")

good = Workload("good", Net, batch, nn.functional.cross_entropy, Size(32, 2))
idle = Workload("idle", Idle, batch, nn.functional.cross_entropy, Size(32, 2))
chatty = Workload("chatty", Chatty, batch, nn.functional.cross_entropy, Size(32, 2))
stiff = Workload("stiff", lambda width, depth: Net(16, depth), batch, nn.functional.cross_entropy)
def unreadable(seed, step):
    raise OSError("disk gone")

dry = Workload("dry", Net, unreadable, nn.functional.cross_entropy)
failing = Workload("failing", broken, batch, nn.functional.cross_entropy)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # What the commands print is compared by words, not by lines.
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def run(*arguments, capsys):
    """Exit status, standard output, standard error."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    code = left.value.code
    out, err = capsys.readouterr()
    return code or 0, out, err


TELLING = """
import sys

from theodolite.cli import main

for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit as left:
        assert not left.code or words == "--show-completion", words
    imported = {"torch", "numpy", "plotly", "jinja2"} & sys.modules.keys()
    assert not imported, (words, imported)
"""


def test_what_only_tells_does_not_import_torch():
    shell = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "SHELL": "/bin/bash"}
    commands = [f"{name} --help".strip() for name in ("", "survey", "plan", "lr", "data")]
    done = subprocess.run(
        [sys.executable, "-c", TELLING, "--version", *commands, "--show-completion"],
        env=os.environ | shell,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: theodolite") == len(commands)


def test_the_version(capsys):
    assert run("--version", capsys=capsys) == (0, f"theodolite {theodolite.__version__}\n", "")


def test_help_teaches_with_examples(capsys):
    _, out, _ = run("--help", capsys=capsys)
    for example in (
        "theodolite survey model.py:workload",
        "theodolite survey hf:config.json",
        "dissect gpt-sotu",
        "theodolite plan gpt-sotu --width 1024",
    ):
        assert example in out
    _, out, _ = run("plan", "--help", capsys=capsys)
    assert "theodolite plan hf:config.json --base-width 256 --base-depth 4 --lr 0.004" in out


def test_completion_offers_the_commands():
    done = subprocess.run(
        [sys.executable, "-m", "theodolite"],
        env=os.environ
        | {"_THEODOLITE_COMPLETE": "complete_bash", "COMP_WORDS": "theodolite ", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    commands = [one.callback.__name__ for one in app.registered_commands if one.callback]
    groups = [one.name for one in app.registered_groups]
    assert done.stdout.split() == [*commands, *groups]
    assert {"survey", "plan", "study"} < {*commands, *groups}


FEW = ("--only", "anatomy", "--only", "growth")
"""Sections that take no time."""


def test_a_survey_prints_its_findings_and_writes_page_and_data(mine, capsys):
    code, out, err = run(
        *("survey", "mine.py:good", "--out", "here.html", "--depth", "3", *FEW, "--only", "stream"),
        capsys=capsys,
    )
    # A slow survey tells its progress.
    assert (code, re.sub(r"\d+% .+\n", "", err)) == (0, "")
    assert out.startswith("good can be scaled")
    assert "good at 32 × 3" in out
    assert "The page is here.html, its data are in here.json" in out
    assert sorted(path.name for path in mine.glob("here.*")) == ["here.html", "here.json"]
    saved = json.loads((mine / "here.json").read_text())
    assert saved["size"] == {"width": 32, "depth": 3}
    assert saved["verdict"] in out


def test_sections_can_be_chosen(mine, capsys):
    run("survey", "mine.py:good", "--only", "norms", "--only", "growth", "--skip", "norms", capsys=capsys)
    assert list(json.loads((mine / "survey.json").read_text())["seconds"]) == ["growth"]


def test_strict_turns_a_failed_check_into_exit_1(mine, capsys):
    assert run("survey", "mine.py:idle", *FEW, capsys=capsys)[0] == 0
    code, out, _ = run("survey", "mine.py:idle", "--strict", *FEW, capsys=capsys)
    assert code == 1
    assert "idle has shape (3, 5)" in out
    assert (mine / "survey.html").exists()
    assert run("survey", "mine.py:good", "--strict", *FEW, capsys=capsys)[0] == 0
    assert run("survey", "mine.py:idle", "--strict", "--role", "idle=bias", *FEW, capsys=capsys)[0] == 0


PLAN = ["plan", "mine.py:good", "--width", "64", "--lr", "0.1"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["survey", "mine.py:failing"], "build(width=128, depth=4) failed: KeyError: 'no such layer'"),
        (["survey", "mine.py:stiff"], "build ignores width"),
        (["survey", "mine.py:absent"], "mine.py has no 'absent'"),
        (["survey", "absent.py:good"], "absent.py is not there"),
        (["survey", "hf:absent.json"], "absent.json"),
        (["survey", "gpt-sout"], "Did you mean 'gpt-sotu'?"),
        (["survey", "mine.py:good", "--only", "norm"], "there is no section 'norm'"),
        (["survey", "mine.py:good", "--width", "0"], "width is 0"),
        (["survey", "mine.py:good", "--out", "no/survey.html"], "there is no folder no"),
        (["survey", "mine.py:good", "--role", "bias"], "write PATTERN=ROLE"),
        (["survey", "mine.py:good", "--role", "first.weight=big"], "a role is one of"),
        (["survey", "mine.py:good", "--role", "second.*=bias"], "matches no parameter"),
        (["survey", "mine.py:good", "--seed", "-1"], "seed is -1"),
        (["dissect", "mine.py:idle"], "idle has shape (3, 5)"),
        (["dissect", "mine.py:dry"], "workload 'dry': batch(0, 0) failed: OSError: disk gone"),
        (["dissect", "mine.py:good", "--role", "second.*=bias"], "matches no parameter"),
        (
            ["plan", "mine.py:good", "--lr", "0.1"],
            "from 32 × 2 to 32 × 2 there is nothing to plan. Give --width",
        ),
        (
            ["plan", "mine.py:good", "--width", "64"],
            "--lr is missing: give the learning rate that is right at base",
        ),
        ([*PLAN, "--lr", "nan"], "lr is nan"),
        ([*PLAN, "--optimizer", "adam"], "Did you mean 'adamw'?"),
        ([*PLAN, "--decay", "some"], "decay is 'some'"),
        ([*PLAN, "--init", "last"], "--init last: write PATTERN=STD"),
        ([*PLAN, "--init", "last.*=wide"], "--init last.*=wide: 'wide' is no finite number"),
        ([*PLAN, "--init", "lost.*=2^-4"], "'lost.*'"),
        (
            [*PLAN, "--no-decay", "lost.*"],
            "no_decay: no tensor that is trained has a name that matches 'lost.*'",
        ),
        ([*PLAN, "--explain", "lost"], "'lost' is not a tensor of this plan"),
        ([*PLAN, "--diff", "mine.py"], "mine.py is not JSON"),
        ([*PLAN, "--out", "mine.py"], "mine.py: its name must end in .json or .html or .csv"),
        (["plan", "mine.py:idle", "--width", "64", "--lr", "0.1"], "idle has shape (3, 5)"),
        (["lr", "mine.py:good", "--optimizer", "adam"], "Did you mean 'adamw'?"),
        (["lr", "mine.py:good", "--low", "1", "--high", "0.1"], "give low below high"),
        (["lr", "mine.py:good", "--out", "lr.txt"], "its name must end in .html"),
        (["lr", "mine.py:dry"], "workload 'dry': batch(0, 0) failed: OSError: disk gone"),
        (["sweep", "mine.py:good", "--lr", "fast:1"], "--lr fast:1: 'fast' is no finite number"),
        (
            ["sweep", "mine.py:good", "--lr", "1", "--widths", "8,w"],
            "--widths 8,w: 'w' in '8,w' is no positive",
        ),
        (["audit", "mine.py:good", "--depths", "0"], "--depths 0: 0 in '0' is no positive whole number"),
        (["data", "path", "cifar"], "Did you mean 'cifar10'?"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_an_error_of_use_is_one_message_and_exit_2(arguments, words, capsys):
    code, out, err = run(*arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("theodolite: ")
    assert words in err
    assert "Traceback" not in err


def test_a_survey_does_not_overwrite_what_is_no_survey(mine, capsys):
    (mine / "config.json").write_text('{"model_type": "llama"}')
    code, out, err = run("survey", "mine.py:good", "--out", "config.html", capsys=capsys)
    assert (code, out) == (2, "")
    assert "config.json: there is a file that holds no survey" in err
    assert (mine / "config.json").read_text() == '{"model_type": "llama"}'
    assert not (mine / "config.html").exists()


@pytest.mark.usefixtures("mine")
def test_a_terminal_without_greek_shows_what_it_can(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    with pytest.raises(SystemExit) as left:
        main(["survey", "mine.py:good", "--only", "anatomy"])
    sys.stdout.flush()
    assert not left.value.code
    assert "good at 32 ? 2 (width ? depth)" in printed.getvalue().decode("ascii")


def test_an_unknown_option_is_an_error_of_use_too(capsys):
    code, _, err = run("survey", "--brave", capsys=capsys)
    assert code == 2
    assert "--brave" in err


@pytest.mark.usefixtures("mine")
def test_dissect_prints_a_table_or_json(capsys):
    _, table, _ = run("dissect", "mine.py:good", capsys=capsys)
    assert "up.*.weight" in table
    _, text, _ = run("dissect", "mine.py:good", "--width", "48", "--json", capsys=capsys)
    roles = {part["name"]: part["role"] for part in json.loads(text)["parts"]}
    assert (roles["first.weight"], roles["up.0.weight"], roles["last.weight"]) == (
        "input",
        "hidden",
        "output",
    )
    assert json.loads(text)["size"] == {"width": 48, "depth": 2}


@pytest.mark.usefixtures("mine")
def test_what_a_network_prints_is_kept_out_of_json(capsys):
    for words in (["dissect", "mine.py:chatty"], ["plan", "mine.py:chatty", "--width", "64", "--lr", "0.1"]):
        _, out, err = run(*words, "--json", capsys=capsys)
        assert json.loads(out)
        assert {"building", "called"} <= {*err.split()}
    _, out, _ = run("dissect", "--json", "--help", capsys=capsys)
    assert "Usage" in out


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("words", [("plan", "--width", "64"), ("groups",)])
@pytest.mark.parametrize("format", [("--format", "csv"), ("--format=csv",)])
def test_what_a_network_prints_is_kept_out_of_exports(words, format, capsys):
    _, out, err = run(words[0], "mine.py:chatty", *words[1:], "--lr", "0.1", *format, capsys=capsys)
    assert out.startswith("tensor,shape,role,")
    assert "building" not in out
    assert "building" in err


PRINTING = """
import os, subprocess
from theodolite.commands.output import only_results, print_result

with only_results():
    print("python")
    os.write(1, b"descriptor\\n")
    subprocess.run(["echo", "process"], check=True)
    print_result("result")
print("afterwards")
"""


def test_only_results_reach_standard_output_also_past_python():
    done = subprocess.run([sys.executable, "-c", PRINTING], capture_output=True, text=True, check=True)
    assert done.stdout == "result\nafterwards\n"
    assert {*done.stderr.split()} == {"python", "descriptor", "process"}


def test_a_plan_is_printed_explained_compared_and_saved(mine, capsys):
    code, out, err = run(*PLAN, "--depth", "6", "--weight-decay", "0.5", "--out", "plan.json", capsys=capsys)
    assert (code, err) == (0, "The plan is plan.json\n")
    assert out.startswith(
        "adamw, 32 × 2 → 64 × 6 (width × 2, depth × 3)\nat base size lr 0.1, weight decay 0.5"
    )
    assert next(line.split()[-3:] for line in out.splitlines() if line.startswith("up.*.weight")) == [
        "0.05", "1", "1.67e-09",
    ]  # fmt: skip
    plan = theodolite.Plan.load(mine / "plan.json")
    assert plan["down.5.weight"].lr == pytest.approx(0.1 / 2 / 3)

    _, out, _ = run(*PLAN, "--depth", "6", "--explain", "down.*.weight", capsys=capsys)
    assert "η · c/u · α = 0.1 · 1/2 · 1/3 = 0.01667" in out
    _, out, _ = run(*PLAN, "--depth", "6", "--diff", "plan.json", capsys=capsys)
    assert out.startswith("base weight decay: 0.5 → 0\n")
    _, out, _ = run(*PLAN, "--depth", "6", "--weight-decay", "0.5", "--diff", "plan.json", capsys=capsys)
    assert out == "the plans are the same\n"
    _, out, _ = run(*PLAN, "--depth", "6", "--weight-decay", "0.5", "--json", capsys=capsys)
    assert out == (mine / "plan.json").read_text(encoding="utf-8")


def test_numbers_may_be_written_as_powers_of_two(mine, capsys):
    plain = run(*PLAN[:-1], "0.0078125", "--eps", "0.25", capsys=capsys)
    assert run(*PLAN[:-1], "2^-7", "--eps", "2^-2", capsys=capsys) == plain
    code, _, err = run(*PLAN[:-1], "2^x", capsys=capsys)
    assert code == 2
    assert "'--lr': '2^x' is no finite number" in " ".join(err.replace("│", " ").split())


@pytest.mark.usefixtures("mine")
def test_a_plan_may_come_down_from_the_workloads_own_size(capsys):
    arguments = ["--base-width", "16", "--base-depth", "1", "--lr", "0.25", "--optimizer", "muon"]
    _, out, _ = run("plan", "mine.py:good", *arguments, "--vector-lr", "0.125", "--json", capsys=capsys)
    plan = json.loads(out)
    assert (plan["size"], plan["base"]) == ({"width": 32, "depth": 2}, {"width": 16, "depth": 1})
    assert plan["rows"]["up.0.weight"]["lr"] == 0.25  # Muon's learning rate stays
    assert plan["rows"]["last.weight"]["lr"] == 0.125 / 2
    _, out, _ = run(
        "plan", "mine.py:good", *arguments, "--covers", "all", "--init", "up.*.weight=0", capsys=capsys
    )
    assert next(line.split()[1:4] for line in out.splitlines() if line.startswith("last.weight"))[:2] == [
        "output", "muon",
    ]  # fmt: skip
    assert next(line.split()[3] for line in out.splitlines() if line.startswith("up.*.weight")) == "0"


def test_a_config_is_planned_at_its_own_size_from_a_small_one(mine, capsys):
    values = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 6, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}
    (mine / "config.json").write_text(json.dumps(values | heads))
    _, out, _ = run("plan", "hf:config.json", "--lr", "0.25", "--json", capsys=capsys)
    plan = json.loads(out)
    assert (plan["size"], plan["base"]) == ({"width": 256, "depth": 6}, {"width": 128, "depth": 4})
    assert plan["rows"]["model.layers.5.mlp.up_proj.weight"]["lr"] == 0.125


def test_groups_are_printed_translated_and_saved(mine, capsys):
    arguments = ["groups", "mine.py:good", "--optimizer", "muon", "--weight-decay", "0.5"]
    code, out, err = run(*arguments, "--lr", "0.1", "--vector-lr", "0.01", "--out", "g.json", capsys=capsys)
    assert (code, err) == (0, "The groups are g.json\n")
    assert out.startswith("muon, adamw for the rest: Net at 32 × 2\n4 tensors by muon and 8 tensors by adamw")
    assert next(line.split()[1:7] for line in out.splitlines() if line.startswith("up.*.weight")) == [
        "hidden", "muon", "32×32", "1", "0.1", "0.5",
    ]  # fmt: skip
    assert theodolite.Groups.load(mine / "g.json")["last.weight"].lr == 0.01

    _, out, _ = run(*arguments, "--adamw-lr", "0.1", "--translation", "--width", "64", capsys=capsys)
    # 0.1·0.2·√64
    assert next(line.split()[:4] for line in out.splitlines() if line.startswith("64×64")) == [
        "64×64", "4", "0.1", "0.16",
    ]  # fmt: skip
    options = ["--no-decay", "up.*", "--role", "last.weight=hidden", "--covers", "hidden", "--json"]
    _, out, _ = run(*arguments, "--lr", "0.1", *options, capsys=capsys)
    rows = json.loads(out)["rows"]
    assert (rows["up.0.weight"]["weight_decay"], rows["last.weight"]["rule"]) == (0, "muon")


@pytest.mark.usefixtures("mine")
def test_groups_that_cannot_be_made_are_refused_in_one_line(capsys):
    code, _, err = run("groups", "mine.py:good", capsys=capsys)
    assert code == 2
    assert err.startswith("theodolite: --lr is missing: give the learning rate of muon, or as --adamw-lr")
    assert run("groups", "mine.py:good", "--lr", "1", "--adamw-lr", "1", capsys=capsys)[0] == 2
    assert run("groups", "mine.py:good", "--lr", "1", "--out", "groups.txt", capsys=capsys)[0] == 2


@pytest.mark.usefixtures("mine")
def test_learning_rates_are_printed_and_drawn(mine, capsys):
    few = ["lr", "mine.py:good", "--steps", "3", "--seeds", "2", "--low", "0.001", "--high", "1"]
    code, out, err = run(*few, "--out", "lr.html", capsys=capsys)
    assert code == 0
    assert out.startswith("good, 32 × 2 with adamw: learning rates from ")
    assert "over 2 seeds" in out
    assert "The page is lr.html" in err
    facts = json.loads((mine / "lr.json").read_text())
    assert [curve["seed"] for curve in facts["curves"]] == [0, 1]
    assert f"best {facts['best']:.2g}" in out
    assert json.loads(run(*few, "--json", capsys=capsys)[1])["best"] == facts["best"]
    code, out, _ = run(*few[:4], "--low", "1000", "--high", "10000", capsys=capsys)
    assert code == 1
    assert "raises the loss. Try lower ones" in out


def test_data_sets_are_listed_with_what_is_here(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path / "empty"))
    _, out, _ = run("data", "list", capsys=capsys)
    here = {line.split()[0]: line.split()[1] for line in out.splitlines()[2:] if line[:1].strip()}
    assert here["sotu"] == here["modular-addition"] == "yes"
    assert here["enwik8"] == here["mnist"] == "no"


def test_the_path_of_a_data_set_is_a_folder_with_it(capsys):
    _, out, _ = run("data", "path", "sotu", capsys=capsys)
    assert os.listdir(out.strip()).count("state_of_the_union.txt.xz") == 1
    _, fetched, _ = run("data", "fetch", "sotu", capsys=capsys)
    assert fetched == out


def test_first_use_draws_no_random_number():
    program = (
        "import random; before = random.getstate(); import theodolite as th; th.find_lr; "
        "print(random.getstate() == before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lr", "mine.py:good", "--device", "gpu"], "device is 'gpu': it is cpu, cuda or cuda:1"),
        (["lr", "mine.py:good", "--device", "cpu:7"], "device is 'cpu:7'"),
        (["lr", "mine.py:good", "--low", "1e-320"], "low 9.99989e-321"),
        (["study", "coordinates", "--device", "gpu"], "device is 'gpu'"),
        (["study", "norm-placement", "--device", "gpu"], "device is 'gpu'"),
        (["study", "transfer", "--device", "gpu", "--small"], "device is 'gpu'"),
        (["survey", "~nouser/w.py:net"], "there is no user 'nouser'"),
        (["survey", "mine.py:good", "--out=~nouser/x.html"], "there is no user 'nouser'"),
        (["survey", "mine.py:good", "--out", "x" * 300 + ".html"], "File name too long"),
        (["survey", "mine.py:good", "--depth", "999999999999"], "depth is 999999999999: the largest"),
        (["survey", "y" * 9000], "there is no workload 'yyy"),
        (["survey", "a\nb"], "there is no workload"),
        (
            ["plan", "mine.py:good", "--width", "64", "--lr", "1", "--diff", "deep.json"],
            "deep.json is not JSON",
        ),
        (["plan", "mine.py:good", "--width", "64", "--lr", "1", "--diff", "pipe"], "pipe cannot be read"),
        (
            ["plan", "mine.py:good", "--lr", "1", "--tokens", "inf", "--base-tokens", "1e5"],
            "--tokens inf: give a positive whole number",
        ),
        (["survey", "hf:deep.json"], "deep.json is not JSON"),
        (["study", "ghosts", "--out", "x" * 300], "File name too long"),
        (["study", "ghosts", "--draw", "binary"], "binary cannot be read: it is not a text in UTF-8"),
        (["study", "ghosts", "--draw", "odd.jsonl"], "its records are not those that this study writes"),
        (["study", "scale-vectors", "--small", "--out", "mine.py"], "mine.py: File exists"),
        (["sweep", "mine.py:good", "--lr", "1", "--seeds", "999999999999"], "seeds is 999999999999"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line_and_leaves_nothing(mine, arguments, message, capsys):
    (mine / "deep.json").write_text("[" * 100_000)
    (mine / "binary").write_bytes(b"\xff\xfe\x00")
    (mine / "odd.jsonl").write_text('{"study": "ghosts"}\n{"seed": 0}\n')
    os.mkfifo(mine / "pipe")
    before = sorted(path.name for path in mine.iterdir() if path.name != "__pycache__")
    code, _, err = run(*arguments, capsys=capsys)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert len(err) < 1500
    assert sorted(path.name for path in mine.iterdir() if path.name != "__pycache__") == before


def test_a_fault_of_its_own_is_shown_whole(monkeypatch, capsys):
    def fault():
        raise KeyError("what we did not think of")

    monkeypatch.setattr("theodolite.data.catalogue", fault)
    with pytest.raises(KeyError) as caught:
        main(["data", "list"])
    assert "report this" in caught.value.__notes__[0]
