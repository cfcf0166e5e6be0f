"""Exports as Python files: two tables of names and numbers, and functions that need nothing of this library.

A file has `GROUPS`, options by the name of a group, and `TENSORS`, one line for each pattern of names. Its
functions refuse a model that has other tensors or shapes, and name them.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import theodolite
from theodolite.anatomy.names import starred
from theodolite.planning.exporting.exported import Content, many
from theodolite.planning.init_distribution import InitDistribution, cut_of
from theodolite.planning.rows import PlanRow


@dataclass(frozen=True)
class Grouping:
    """Tensors with equal options, merged."""

    groups: Mapping[str, Mapping[str, Any]]
    """Options by the name of a group."""
    group_of: Mapping[str, str] = field(default_factory=dict)
    """By tensor: its group."""

    def members(self, group: str) -> list[str]:
        """The tensors of a group."""
        return [name for name, own in self.group_of.items() if own == group]


def grouped(content: Content, options: Callable[[PlanRow], Mapping[str, Any]]) -> Grouping:
    """Merge tensors with equal options; a group is named by its rule, if there are several, and its roles."""
    alike: dict[str, tuple[Mapping[str, Any], list[PlanRow]]] = {}
    for row in content.trained:
        made = options(row)
        key = repr({name: f"{one:.12e}" if isinstance(one, float) else one for name, one in made.items()})
        alike.setdefault(f"{row.rule} {key}", (made, []))[1].append(row)
    said = []
    for _, rows in alike.values():
        roles = "+".join(dict.fromkeys(row.role for row in rows))
        said.append(f"{rows[0].rule}-{roles}" if len(content.rules) > 1 else roles)
    often = Counter(said)
    groups: dict[str, Mapping[str, Any]] = {}
    group_of: dict[str, str] = {}
    for name, (made, rows) in zip(said, alike.values(), strict=True):
        if often[name] > 1:
            name += f"-{1 + sum(one.rpartition('-')[0] == name for one in groups)}"
        groups[name] = made
        group_of |= dict.fromkeys((row.name for row in rows), name)
    return Grouping(groups, group_of)


def folded(rows: Iterable[PlanRow], key: Callable[[PlanRow], Any]) -> dict[str, list[PlanRow]]:
    """Rows by a name or a pattern with stars for the numbers of the path.

    Where rows of one pattern differ in their key, the most frequent key has the pattern and the others stand
    by their names: a name is looked up before its pattern. No pattern stands for one row.
    """
    by_pattern: dict[str, list[PlanRow]] = {}
    for row in rows:
        by_pattern.setdefault(starred(row.name, steps=True), []).append(row)
    found: dict[str, list[PlanRow]] = {}
    for pattern, some in by_pattern.items():
        ((usual, often),) = Counter(repr(key(row)) for row in some).most_common(1)
        for row in some:
            alone = often == 1 or repr(key(row)) != usual
            found.setdefault(row.name if alone else pattern, []).append(row)
    return found


def python_file(
    content: Content,
    *,
    who: str,
    use: str,
    notes: Sequence[str],
    grouping: Grouping,
    body: str,
    imports: Sequence[str] = (),
    checks_shapes: bool = True,
) -> str:
    """The text of a file.

    Args:
        content: what is exported.
        who: the trainer, for the first line.
        use: code that shows how the file is used.
        notes: what to know; they become comments.
        grouping: the groups.
        body: the functions for this trainer.
        imports: further lines of imports.
        checks_shapes: false if the trainer cuts tensors into shards with other shapes.
    """
    draws = content.draws and checks_shapes
    standard = ["import re", *["import hashlib", "import math"] * draws]
    lines = [
        f'"""{plain(content.title)}, for {who}.',
        "",
        f"Written by theodolite {theodolite.__version__}; it needs {who} and not theodolite.",
        "",
        textwrap.indent(use.strip("\n"), "    "),
        '"""',
        "",
        *sorted(standard),
        "",
        *sorted({"import torch", *imports}, key=lambda line: (line.startswith("from"), line)),
    ]
    if notes:
        lines += ["", *comment(notes)]
    parts = ["\n".join(lines), table("GROUPS", _group_lines(grouping))]
    about = "# Name or pattern: (number of tensors, shape, group, initial values)\n"
    parts.append(about + table("TENSORS", _tensor_lines(content, grouping)))
    if content.multipliers:
        parts.append(f"MULTIPLIERS = {literal(content.multipliers)}  # of the inputs of these modules")
    parts.append(_NAMED if checks_shapes else _ROW)
    if content.multipliers:
        parts.append(ATTACH)
    if draws:
        ending = "attach(model)" if content.multipliers else "model"
        parts.append(_INITIALIZE.replace("RESULT", ending))
    return "\n\n\n".join(part.strip("\n") for part in (*parts, body)) + "\n"


def notes_of_init(content: Content, *, draws: bool = True) -> list[str]:
    """What an exported `initialize` cannot draw, if there is one, and multipliers that must be attached."""
    notes = []
    own = [row for row in content.trained if row.init.kind == "own"]
    if own and draws:
        notes.append(
            f"initialize refuses this model: {patterns(own)} start from values that the network draws by "
            "itself, rescaled. Draw them by plan.initialize(model) of theodolite."
        )
    if draws and any(row.scale_free for row in content.trained if row.init.kind not in ("kept", "own")):
        notes.append(
            "initialize does not compute the singular vectors of a spectral normalisation again. If the "
            "network has one, use plan.initialize(model) of theodolite."
        )
    for module, factor in content.multipliers.items():
        notes.append(
            f"The input of {module} is multiplied by {factor!r}, as it shares its weight with the embedding: "
            "attach(model) puts a hook there, and must be called wherever the model is built. After training "
            "th.surgery.bake(model, inputs) folds the factor into the norm before it."
        )
    return notes


def eps_note(who: str, rows: Sequence[PlanRow], fixed: float, what: str) -> list[str]:
    """The note that a trainer has one eps where the plan has others."""
    others = sorted({row.eps for row in rows if row.eps != fixed})
    if not others:
        return []
    span = f"{others[0]:.3g}" if len(others) == 1 else f"{others[0]:.3g} to {others[-1]:.3g}"
    return [f"{who} {what} {fixed:g}, where the plan has {span} for {patterns(rows)}."]


def plain(text: str) -> str:
    """A text for the inside of three quotes."""
    return text.replace("\\", "\\\\").replace('"""', "'''")


def comment(notes: Iterable[str]) -> list[str]:
    """Notes as comments."""
    lines = []
    for note in notes:
        for line in note.splitlines():
            lines += textwrap.wrap(line, 100, initial_indent="# ", subsequent_indent="#   ")
    return lines


def literal(value: Any) -> str:
    """A value as Python code, with double quotes.

    >>> literal({"w": (1, [2.5, None], "x")})
    '{"w": (1, [2.5, None], "x")}'
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)}: {literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return repr(value)


def patterns(rows: Iterable[PlanRow]) -> str:
    """A few patterns for the names of rows."""
    return many(dict.fromkeys(starred(row.name, steps=True) for row in rows))


def table(name: str, lines: Iterable[str]) -> str:
    """A dict with one entry in each line."""
    return f"{name} = {{\n" + "".join(f"    {line},\n" for line in lines) + "}"


def _group_lines(grouping: Grouping) -> list[str]:
    return [f"{literal(name)}: {literal(options)}" for name, options in grouping.groups.items()]


def _tensor_lines(content: Content, grouping: Grouping) -> list[str]:
    def values(row: PlanRow) -> tuple[Any, ...]:
        return tuple(row.shape), grouping.group_of.get(row.name), _init(row.init)

    lines = []
    for pattern, rows in folded(content.rows.values(), values).items():
        lines.append(f"{literal(pattern)}: {literal((len(rows), *values(rows[0])))}")
    return lines


def _init(init: InitDistribution) -> tuple[Any, ...]:
    """The kind and the numbers that `_draw` of the file takes."""
    if init.kind == "constant":
        return "constant", init.mean
    if init.kind == "truncated" and init.bound is not None and init.std:
        return "truncated", init.mean, init.bound, cut_of(init.std / init.bound)
    if init.kind in ("normal", "uniform"):
        return init.kind, init.mean, init.std
    return ("constant", init.mean) if init.kind == "truncated" else (init.kind,)


PLAIN = '''
def _plain(name):
    """A name without those of wrappers."""
    return re.sub(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\\.", "", name)
'''

_ROW = f'''
{PLAIN.strip()}


def _look_up(name):
    """The plain name of a parameter, and its key in TENSORS, or None."""
    name = _plain(name)
    while True:
        for key in (name, re.sub(r"(?<![^.])\\d+(?![^.])", "*", name)):
            if key in TENSORS:
                return name, key
        if not name.startswith("module."):
            return name, None
        name = name.removeprefix("module.")
'''

_NAMED = f'''
{_ROW.strip()}


def named(model):
    """By name: each parameter of the model and its key in TENSORS. A model with others is refused."""
    found, wrong = {{}}, []
    counts = dict.fromkeys(TENSORS, 0)
    for name, tensor in model.named_parameters():
        name, row = _look_up(name)
        if row is None:
            wrong.append(f"{{name}} is not in the plan")
            continue
        counts[row] += 1
        _, shape, group, _ = TENSORS[row]
        if tuple(tensor.shape) != shape:
            wrong.append(f"{{name}} has shape {{tuple(tensor.shape)}}, planned {{shape}}")
        elif group is not None and not tensor.requires_grad:
            wrong.append(f"{{name}} is frozen, and the plan trains it")
        found[name] = (tensor, row)
    for row, count in counts.items():
        if count != TENSORS[row][0]:
            wrong.append(f"the plan has {{TENSORS[row][0]}} of {{row}}, the model {{count}}")
    if wrong:
        more = f"; and {{len(wrong) - 8}} more" if len(wrong) > 8 else ""
        raise ValueError("the model is not the one of the plan: " + "; ".join(wrong[:8]) + more)
    return found


def _groups(model):
    """Parameter groups: the options of GROUPS, a name, and the tensors."""
    tensors = {{group: [] for group in GROUPS}}
    for tensor, row in named(model).values():
        if TENSORS[row][2] is not None:
            tensors[TENSORS[row][2]].append(tensor)
    return [{{"name": name, "params": tensors[name], **options}} for name, options in GROUPS.items()]
'''

ATTACH = '''
class InputFactor:
    """A forward pre-hook that multiplies the first tensor a module is called with."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, module, args, kwargs):
        for place, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                return (*args[:place], value * self.factor, *args[place + 1 :]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                return args, {**kwargs, name: value * self.factor}
        return args, kwargs


def attach(model):
    """Put the multipliers on the model; twice is as good as once. Before torch.compile."""
    modules = {}
    for name, module in model.named_modules():
        modules.setdefault(_plain(name).removeprefix("module."), module)
        modules[_plain(name)] = module
    for name, factor in MULTIPLIERS.items():
        if name not in modules:
            raise ValueError(f"the plan multiplies the input of {name}, and the model has no such module")
        hooks = modules[name]._forward_pre_hooks.values()
        if not any(getattr(hook, "factor", None) == factor for hook in hooks):
            modules[name].register_forward_pre_hook(InputFactor(factor), with_kwargs=True)
    return model
'''

_INITIALIZE = '''
def initialize(model, seed=0):
    """Draw the planned initial values in place. A seed draws the same values on every device."""
    tensors = named(model)
    for name, (tensor, row) in tensors.items():
        if TENSORS[row][3][0] == "own":
            raise ValueError(f"{name} starts from values that the network draws: use plan.initialize(model)")
        if tensor.is_meta or hasattr(tensor, "device_mesh") or tensor.is_complex():
            raise ValueError(f"{name} is on meta, sharded or complex: draw the values before, on one device")
    with torch.no_grad():
        for name, (tensor, row) in tensors.items():
            kind, *numbers = TENSORS[row][3]
            if kind != "kept":
                digest = hashlib.sha256(f"{seed}/0/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
                tensor.copy_(_draw(kind, numbers, tensor.shape, generator))
    return RESULT


def _draw(kind, numbers, shape, generator):
    mean, *rest = numbers
    values = torch.empty(shape, dtype=torch.float32)
    if kind == "constant":
        return values.fill_(mean)
    if kind == "normal":
        return values.normal_(mean, rest[0], generator=generator)
    if kind == "uniform":
        half = rest[0] * math.sqrt(3)
        return values.uniform_(mean - half, mean + half, generator=generator)
    bound, cut = rest  # a normal variable within ±bound
    edge = math.erf(cut / math.sqrt(2))
    values = values.double().uniform_(-edge, edge, generator=generator)
    values.erfinv_().mul_(bound / cut * math.sqrt(2)).clamp_(-bound, bound)
    return values.add_(mean).float()
'''
