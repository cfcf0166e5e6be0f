"""A training run as a value, a grid of runs, and the outcome of a run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from theodolite.core import arguments
from theodolite.core.errors import UseError
from theodolite.core.files import plain_text
from theodolite.core.size import Size
from theodolite.fleet.provenance import ADDED, digest_of
from theodolite.optimizers import OPTIMIZERS, POLICIES
from theodolite.optimizers.horizon import Horizon
from theodolite.optimizers.schedule import KINDS
from theodolite.planning.parameterization import PARAMETERIZATIONS, Parameterization
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, counted, number

Precision = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")
Status = Literal["finished", "diverged", "failed"]
PROBES = ("gradient", "sizes", "accuracy")
"""`gradient`: the norm of the gradient at every step that is recorded. `sizes`: root mean squares of stream,
branches and logits after training. `accuracy`: the part of the targets whose logit is the largest, after
training, over the held-out batches (`accuracy`) and over the last batch trained on (`train accuracy`)."""


@dataclass(frozen=True)
class Run:
    """Everything that determines the result of a training run, except the machine.

    Args:
        workload: the name it can be looked up by, see `theodolite.workload`.
        size: of the network; with `batch` and `tokens` if these are varied. `tokens` then belongs to `steps`,
            see `Workload.steps_for`.
        lr: learning rate at base size; with `own` in place of the default learning rate of the workload's
            (first) optimizer: the rates of all its groups are multiplied by the same factor.
        optimizer: a name in `theodolite.optimizers.OPTIMIZERS`; `own` with the parameterization `own`.
        parameterization: `plan`; `standard`: the network's own initialisation and one learning rate for
            all tensors; or `own`: the network as it builds itself, with the workload's optimizer.
        base: the size that the plan starts from; None with `standard` and `own`, which have no such size.
        seed: of the initialisation and of the batches.
        steps: how many.
        weight_decay, decay, eps, vector_lr, options, vector_options: as in `theodolite.plan`; not with
            `own`, whose optimizer has its own.
        horizon: the rule for batch and tokens of a plan, as in `theodolite.plan`.
        init_scale: factor on everything that starts at random: weights, and biases that do not start at a
            constant; not gains. 1 with `own`.
        temperature: the logits are divided by it before the loss.
        schedule, warmup, final: as in `plan.schedule`.
        precision: `float32`; `tf32`, in which a GPU multiplies matrices with ten bits of mantissa; or
            `bfloat16` for autocast. Parameters are float32 in all of them.
        held_out: number of held-out batches; their mean loss is the run's result.
        every: steps between records of the training loss.
        probes: names in `PROBES`.
        evaluate_every: steps between evaluations along training, which record the series `held-out loss`, and
            with the probe `accuracy` also `accuracy` and `train accuracy`. 0 for none, unless a `StepsTo` of
            the workload needs them.

    >>> run = Run("gpt-sotu", Size(128, 4), lr=2**-8, parameterization="standard")
    >>> run.identity == Run("gpt-sotu", Size(128, 4), lr=0.00390625, parameterization="standard").identity
    True
    >>> run.identity == dataclasses.replace(run, seed=1).identity
    False
    """

    workload: str
    size: Size
    lr: float
    optimizer: str = "adamw"
    parameterization: Parameterization = "plan"
    base: Size | None = None
    seed: int = 0
    steps: int = 100
    weight_decay: float = 0.0
    decay: str = "paper"
    eps: float | None = None
    vector_lr: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    vector_options: Mapping[str, Any] = field(default_factory=dict)
    init_scale: float = 1.0
    temperature: float = 1.0
    schedule: str = "linear"
    warmup: int = 0
    final: float = 0.0
    precision: Precision = "float32"
    held_out: int = 16
    every: int = 1
    probes: tuple[str, ...] = ()
    evaluate_every: int = 0
    horizon: str = "none"

    def __post_init__(self) -> None:
        _check(self)

    def __hash__(self) -> int:
        return hash(self.identity)

    @functools.cached_property
    def identity(self) -> str:
        """The hash of the value, in 16 hexadecimal digits: the same in every process and on every machine."""
        return digest_of(self.to_dict())[:16]

    def to_dict(self) -> dict[str, Any]:
        """The value as JSON; without what older runs did not have, where it changes nothing."""
        values: dict[str, Any] = {}
        for name in AXES:
            value = getattr(self, name)
            if isinstance(value, Size):
                value = listed_size(value)
            elif isinstance(value, Mapping):
                value = {str(key): _listed(item) for key, item in sorted(value.items())}
            elif value is not None and (name in REAL or name in WHOLE):  # JSON takes no numbers of NumPy
                value = float(value) if name in REAL else int(value)
            values[name] = _listed(value)
        for name, usual in ADDED.items():  # the identities of older runs stay
            if values[name] == usual:
                del values[name]
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Run:
        """The inverse of `to_dict`.

        >>> import json
        >>> run = Run("gpt-sotu", Size(64, 2), lr=0.1, base=Size(32, 2), options={"betas": (0.9, 0.95)})
        >>> Run.from_dict(json.loads(json.dumps(run.to_dict()))).identity == run.identity
        True
        """
        values = dict(values)
        for name in ("size", "base"):
            if values.get(name) is not None:
                values[name] = Size(*values[name])
        values["probes"] = tuple(values.get("probes", ()))
        return Run(**values)

    def __str__(self) -> str:
        parts = [self.workload, str(self.size), self.optimizer, self.parameterization, f"lr {self.lr:.4g}"]
        for name, sign in (("weight_decay", "decay"), ("init_scale", "init ×"), ("temperature", "T")):
            if getattr(self, name) != getattr(Run, name):
                parts.append(f"{sign} {getattr(self, name):.4g}")
        return f"{' '.join(parts)}, seed {self.seed}"


OWN = "own"
"""The parameterization, and the optimizer, of a workload's own."""
BASELESS = ("standard", OWN)
"""Parameterizations that start from no base size."""
OF_OPTIMIZER: Mapping[str, Any] = {
    **{"weight_decay": 0.0, "decay": "paper", "eps": None, "vector_lr": None, "init_scale": 1.0},
    **{"options": {}, "vector_options": {}},
}
"""Fields that mean nothing for an optimizer of the workload's own, with the values that they have then."""
WHOLE = {"seed": 0, "steps": 1, "warmup": 0, "held_out": 1, "every": 1, "evaluate_every": 0}
"""Fields that are integers, and the least that each may be."""
REAL = ("lr", "weight_decay", "eps", "vector_lr", "init_scale", "temperature", "final")
AXES = tuple(each.name for each in dataclasses.fields(Run))


@dataclass(frozen=True)
class Grid:
    """All combinations of values of some fields of a run; `seed` is always one of them.

    Args:
        axes: by name of a field of `Run`, the values it takes. An option of the optimizer can be an axis too:
            `options.betas`.
        fixed: the fields that all runs share.
        of_size: fields that follow from the size, such as the steps from its tokens.

    Runs of the `standard` parameterization get no base, so a grid over both parameterizations may fix one.
    Those of `own` get no base, the optimizer `own` and, in a grid with others, nothing that their optimizer
    has itself, such as a weight decay. Equal runs are one run.

    >>> axes = {"lr": [2**-9, 2**-8], "seed": range(3), "parameterization": ["plan", "standard"]}
    >>> grid = Grid(axes, {"workload": "gpt-sotu", "size": Size(128, 4), "base": Size(64, 4)})
    >>> len(grid.runs)
    12
    """

    axes: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    of_size: Mapping[Size, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "seed" not in self.axes:
            raise UseError(
                "the grid has no axis 'seed': a claim needs a spread, so give seeds, as in range(3)"
            )
        for name in (*self.axes, *self.fixed):
            top, dot, option = name.partition(".")
            if top not in AXES or (dot and not (top in ("options", "vector_options") and option)):
                near = arguments.did_you_mean(name, AXES) or f" A run has {', '.join(AXES)}"
                raise UseError(f"{name!r} is no field of a run.{near}")
        for name, values in self.axes.items():
            if name in self.fixed:
                raise UseError(f"{name} is an axis of the grid and fixed at {self.fixed[name]!r}: give one")
            if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
                raise UseError(f"axis {name} is {values!r}: give a list of values")
            if not list(values):
                raise UseError(f"axis {name} is empty: give at least one value")
        mixed = next((name for name in self.axes if name.partition(".")[0] in OF_OPTIMIZER), None)
        if OWN in self._parameterizations and mixed is not None:
            raise UseError(
                f"{mixed} is an axis, and the own parameterization has what its optimizer has: leave out the "
                "axis, or the parameterization own"
            )

    @property
    def _parameterizations(self) -> set[Any]:
        return {*self.axes.get("parameterization", [self.fixed.get("parameterization")])}

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """Every combination, each once; the last axis changes fastest."""
        found: dict[str, Run] = {}
        kinds = self._parameterizations
        for values in itertools.product(*self.axes.values()):
            fields: dict[str, Any] = {}
            for name, value in (*self.fixed.items(), *zip(self.axes, values, strict=True)):
                top, _, option = name.partition(".")
                fields[top] = {**fields.get(top, {}), option: value} if option else value
            fields |= self.of_size.get(fields.get("size"), {})  # type: ignore[arg-type]
            if fields.get("parameterization") in BASELESS:
                fields |= {"base": None, "horizon": "none"}
            if fields.get("parameterization") == OWN:
                if kinds != {OWN}:  # these are for the others
                    fields = {name: value for name, value in fields.items() if name not in OF_OPTIMIZER}
                fields["optimizer"] = OWN
            run = Run(**fields)
            found[run.identity] = run
        return tuple(found.values())


@dataclass(frozen=True)
class Outcome(Result):
    """The outcome of one attempt at a run.

    `finished` and `diverged` are results; `failed` is an exception, which may be tried again.
    """

    kind = "outcome of a run"

    run: Run
    status: Status
    step: int
    """Steps made; for a diverged run the step whose loss was not finite, counted from 0."""
    held_out: float | None
    """The mean loss over the held-out batches after training; None unless it is finite."""
    metrics: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """By name (`loss`, `gradient`, `held-out loss`), the recorded (step, value) pairs."""
    readings: Mapping[str, Any] = field(default_factory=dict)
    """What was measured once: the number of `parameters`, the `tokens` seen, results of probes, metrics."""
    seconds: float = 0.0
    """Of this run; its share of the time if several were made together."""
    device: str = "cpu"
    engine: str = "serial"
    error: str | None = None
    """The traceback of a failed run."""

    def blocks(self) -> Iterator[Block]:
        """The run, how it ended, and what was measured."""
        loss = "" if self.held_out is None else f", held-out loss {number(self.held_out, 4)}"
        yield f"{self.run}: {self.status} after {counted(self.step, 'step')}{loss}"
        if self.error:
            yield self.reason
        readings = {name: value for name, value in self.readings.items() if isinstance(value, int | float)}
        yield Table(("reading", "value"), list(readings.items()))

    @property
    def reason(self) -> str:
        """The last line of a failed run's error, as a terminal can show it."""
        lines = plain_text(self.error or "").strip().splitlines()
        return lines[-1].strip() if lines else "no reason was given"

    @property
    def settled(self) -> bool:
        """Is it a result, which need not be run again?"""
        return self.status != "failed"


def listed_size(size: Size) -> list[int | None]:
    """A size as JSON: width and depth; with batch and tokens where one of them is said."""
    whole = [size.width, size.depth, size.batch, size.tokens]
    return whole[:2] if size == size.network else whole


def _check(run: Run) -> None:
    for name, value in (("size", run.size), ("base", run.base)):
        if not isinstance(value, Size) and not (name == "base" and value is None):
            raise UseError(f"{name} is {value!r}: give a Size, for example Size(256, 4)")
    choices: dict[str, Iterable[str]] = {"parameterization": PARAMETERIZATIONS, "precision": PRECISIONS}
    for name in ("batch", "tokens"):
        if run.base is not None and getattr(run.size, name) is None is not getattr(run.base, name):
            raise UseError(
                f"base has {name}={getattr(run.base, name)} and size has none, so that the plan may not be "
                f"for the {name} of the run: give size the {name} too"
            )
    choices |= {} if run.parameterization == OWN else {"optimizer": OPTIMIZERS}
    for name, known in (choices | {"schedule": KINDS, "decay": POLICIES}).items():
        arguments.one_of(name, getattr(run, name), tuple(known))
    object.__setattr__(run, "horizon", str(Horizon.of(run.horizon)))
    if run.parameterization in BASELESS and run.horizon != "none":
        raise UseError(
            f"horizon is {run.horizon!r}: the {run.parameterization} parameterization has the same values "
            "for all batches and tokens. Leave it out"
        )
    for probe in run.probes:
        arguments.one_of("probe", probe, PROBES)
    if run.parameterization == OWN:
        _check_own(run)
    elif OPTIMIZERS[run.optimizer].averages and run.schedule != "constant":
        raise UseError(
            f"schedule is {run.schedule!r}: {run.optimizer} replaces one. Give schedule='constant'"
        )
    if run.parameterization == "plan" and run.base is None:
        raise UseError("base is None: a plan starts from a base size. Give one, as in base=Size(128, 4)")
    if run.parameterization in BASELESS and run.base is not None:
        raise UseError(
            f"base is {run.base}: the {run.parameterization} parameterization has none. Leave it out"
        )
    for name in REAL:
        value = getattr(run, name)
        if value is None and name in ("eps", "vector_lr"):
            continue
        if name in ("weight_decay", "final", "eps"):
            arguments.number(name, value, least=0, most=1 if name == "final" else math.inf)
        else:
            arguments.positive(name, value)
    if run.vector_lr is not None and not OPTIMIZERS[run.optimizer].matrices_only:
        raise UseError(f"vector_lr is for what a matrix optimizer leaves to AdamW; {run.optimizer} is none")
    for name, least in WHOLE.items():
        arguments.whole(name, getattr(run, name), least=least)
    if run.warmup >= run.steps:
        raise UseError(f"warmup is {run.warmup}: it has to be less than the {run.steps} steps")


def _check_own(run: Run) -> None:
    """Refuse what the workload's optimizer says itself."""
    if run.optimizer != OWN:
        raise UseError(
            f"optimizer is {run.optimizer!r}: with the own parameterization it is the workload's. "
            "Give optimizer='own'"
        )
    for name, usual in OF_OPTIMIZER.items():
        if (value := getattr(run, name)) != usual:
            raise UseError(
                f"{name} is {value!r}: with the own parameterization the workload's optimizer has its own. "
                "Leave it out"
            )


def _listed(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    return [_listed(item) for item in value] if isinstance(value, tuple | list) else value
