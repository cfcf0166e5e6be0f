"""Exports for torch's own optimizers, as they are or under a Hugging Face Trainer.

`torch.optim.Muon` takes tensors of two dimensions, multiplies by a factor of their shape (`adjust_lr_fn`) and
orthogonalises in bfloat16. Tensors that hold several matrices, or a matrix in more than two dimensions, get
the file's `CutMuon`, which calls torch's step for each of their matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from theodolite.anatomy.names import starred
from theodolite.optimizers.muon import SCALES
from theodolite.planning.exporting.exported import Content, Format, many
from theodolite.planning.exporting.muon_steps import (
    Seen,
    describe,
    is_muon,
    planned_matrices,
    scale_of,
    step_for,
)
from theodolite.planning.exporting.python_file import grouped, notes_of_init, patterns, python_file
from theodolite.planning.rows import PlanRow

MUON_OPTIONS = {"momentum": 0.95, "nesterov": True, "steps": 5}
CLASSES = {"adamw": "AdamW", "sgd": "SGD"}


def _known(rule: str) -> bool:
    return rule in CLASSES or is_muon(rule)


def group_options(content: Content, row: PlanRow) -> dict[str, Any]:
    """The options of the parameter group of a tensor, and under `optimizer` the class."""
    rule = row.rule
    own: dict[str, Any] = {"lr": row.lr, "weight_decay": row.weight_decay}
    if not is_muon(rule):
        made = {"optimizer": CLASSES[rule], **own, **content.options[rule]}
        if rule == "adamw":
            made = {"betas": (0.9, 0.999), **made, "eps": row.eps}
        return {"optimizer": made.pop("optimizer"), **made}
    options = content.take("torch.optim.Muon", rule, MUON_OPTIONS)
    adjust = "match_rms_adamw" if scale_of(rule) == "rms" else "original"
    shared = {
        "momentum": options["momentum"],
        "nesterov": options["nesterov"],
        "ns_steps": options["steps"],
        "eps": row.eps,
        "adjust_lr_fn": adjust,
    }
    factor = SCALES["rms" if adjust == "match_rms_adamw" else "original"]
    if len(row.shape) == 2 and not row.rows:
        fan_out, fan_in = row.shape
        step = step_for(row, [Seen(1, fan_in, fan_out, factor(fan_in, fan_out))])
        return {"optimizer": "Muon", "lr": step.lr, "weight_decay": step.weight_decay, **shared}
    factors = tuple(one.factor / factor(one.fan_in, one.fan_out) for one in planned_matrices(row))
    cut = (tuple(row.in_axes), tuple(row.out_axes), row.rows, factors)
    return {"optimizer": "CutMuon", **own, **shared, "cut": cut}


def _write(content: Content, who: str, body: str, use: str) -> tuple[str, Sequence[str]]:
    content.refuse_rules(who, _known, "adamw, sgd and the rules of Muon")
    grouping = grouped(content, lambda row: group_options(content, row))
    notes = [*content.notes, *_muon_notes(content), *notes_of_init(content)]
    kinds = list(dict.fromkeys(str(one["optimizer"]) for one in grouping.groups.values()))
    body = body.replace("BASE_LR", repr(content.lr)).replace("BASE_DECAY", repr(content.weight_decay))
    parts, imports = [body.replace("KINDS", _made_of(kinds))], []
    if "CutMuon" in kinds:
        parts.insert(0, _CUT_MUON)
        imports.append("from torch.optim._muon import muon")
    if len(kinds) > 1 and "Together" in body:
        parts.insert(0, _TOGETHER)
    if content.multipliers:
        parts[-1] = parts[-1].replace("    made = ", "    attach(model)\n    made = ")
    if not content.draws:
        use = "\n".join(line for line in use.splitlines() if "initialize" not in line)
    text = python_file(
        content,
        who=who,
        use=use,
        notes=notes,
        grouping=grouping,
        body="\n\n\n".join(part.strip("\n") for part in parts),
        imports=imports,
    )
    return text, notes


def _made_of(kinds: Sequence[str]) -> str:
    """A dict from the class names that occur to the classes."""
    own = ", ".join(f'"{kind}": {kind if kind == "CutMuon" else "torch.optim." + kind}' for kind in kinds)
    return f"{{{own}}}"


def _muon_notes(content: Content) -> list[str]:
    rows = [row for row in content.trained if is_muon(row.rule)]
    if not rows:
        return []
    notes = [
        "torch.optim.Muon orthogonalises in bfloat16 and clamps the norm that it divides by at eps, where "
        "the plan adds eps. The steps are the plan's to about two percent where the gradient has full rank, "
        "and less closely in directions in which it is so small that bfloat16 holds mostly rounding."
    ]
    adjusted = [row for row in rows if scale_of(row.rule) in ("none", "spectral")]
    if adjusted:
        notes.append(
            "torch.optim.Muon multiplies by √max(1, rows/columns). Learning rates and decays of "
            f"{patterns(adjusted)} are adjusted for it, so that the step is the planned one."
        )
    cut = [row for row in rows if len(row.shape) != 2 or row.rows]
    if cut:
        some = {starred(row.name, steps=True): describe(row) for row in cut}
        named = many([f"{name} ({matrices})" for name, matrices in some.items()])
        notes.append(
            f"CutMuon takes torch's step for each matrix inside of {named}; torch.optim.Muon takes whole "
            "tensors of two dimensions only. It takes no shards."
        )
    return notes


_CUT_MUON = '''
class CutMuon(torch.optim.Optimizer):
    """torch's Muon for each matrix inside of a tensor: blocks of rows, a stack, a kernel.

    The `cut` of a group is (dimensions of inputs, of outputs, blocks of outputs, factors of the blocks).
    """

    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = {key: group[key] for key in ("momentum", "nesterov", "ns_steps", "eps", "adjust_lr_fn")}
            options["ns_coefficients"] = (3.4445, -4.7750, 2.0315)
            for tensor in group["params"]:
                if hasattr(tensor, "device_mesh"):
                    raise ValueError("CutMuon takes whole tensors: theodolite's own Muon takes shards")
                if tensor.grad is None:
                    continue
                state = self.state[tensor]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(tensor)
                buffer = state["momentum_buffer"]
                blocks = zip(*(_matrices(one, group["cut"]) for one in (tensor, tensor.grad, buffer)))
                moved = []
                for factor, (weights, grads, averages) in zip(group["cut"][3], blocks, strict=True):
                    lr, decay = group["lr"] * factor, group["weight_decay"] / factor
                    muon(weights, grads, averages, lr=lr, weight_decay=decay, has_complex=False, **options)
                    moved.append((weights, averages))
                _put(tensor, [weights for weights, _ in moved], group["cut"])
                _put(buffer, [averages for _, averages in moved], group["cut"])
        return loss


def _order(tensor, cut):
    """The dimensions as (stack, outputs, inputs), and the sizes of these three."""
    inputs, outputs = cut[:2]
    stack = [axis for axis in range(tensor.ndim) if axis not in (*inputs, *outputs)]
    sizes = [torch.Size(tensor.shape[axis] for axis in axes).numel() for axes in (stack, outputs, inputs)]
    return [*stack, *outputs, *inputs], sizes


def _indices(cut, outputs):
    """By block: the indices of its outputs."""
    blocks = [[row for first, last in block for row in range(first, last)] for block in cut[2]]
    return blocks or [list(range(outputs))]


def _matrices(tensor, cut):
    """By block: copies of its matrices (out, in), one for each member of the stack."""
    order, sizes = _order(tensor, cut)
    stack = tensor.permute(order).reshape(sizes)
    return [[matrix[rows] for matrix in stack] for rows in _indices(cut, sizes[1])]


def _put(tensor, blocks, cut):
    """Write matrices back."""
    order, sizes = _order(tensor, cut)
    stack = tensor.new_empty(sizes)
    for rows, matrices in zip(_indices(cut, sizes[1]), blocks, strict=True):
        for place, matrix in enumerate(matrices):
            stack[place, rows] = matrix
    inverse = [order.index(axis) for axis in range(tensor.ndim)]
    tensor.copy_(stack.reshape([tensor.shape[axis] for axis in order]).permute(inverse))
'''

_TOGETHER = '''
class Together(torch.optim.Optimizer):
    """Several optimizers as one, with common parameter groups and state."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.defaults = dict(optimizers[0].defaults)

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = iter(self.param_groups)  # a checkpoint or a wrapper may have replaced them
        for one in self.optimizers:
            one.param_groups = [next(groups) for _ in one.param_groups]
            one.state = self.state
            one.step()
        return loss
'''

_PARAM_GROUPS = '''
def param_groups(model):
    """The parameter groups by the name of the optimizer's class."""
    found = {}
    for group in _groups(model):
        found.setdefault(group.pop("optimizer"), []).append(group)
    return found
'''

_TORCH = f'''
{_PARAM_GROUPS.strip()}


def make_optimizers(model):
    """One optimizer for each class: step all of them."""
    classes = KINDS
    made = [classes[kind](groups) for kind, groups in param_groups(model).items()]
    return made
'''

_HUGGING_FACE = f'''
DEFAULTS = {{"lr": BASE_LR, "weight_decay": BASE_DECAY}}  # at base size, for schedules with a lowest rate


{_PARAM_GROUPS.strip()}


def make_optimizer(model):
    """One optimizer for all parameters."""
    classes = KINDS
    made = [classes[kind](groups) for kind, groups in param_groups(model).items()]
    optimizer = made[0] if len(made) == 1 else Together(made)
    optimizer.defaults.update(DEFAULTS)
    return optimizer


class OptimizerFactory:
    """What the Trainer's optimizer_cls_and_kwargs takes: it calls OptimizerFactory()(model, **kwargs)."""

    def __call__(self, model):
        return make_optimizer(model)
'''

_USE_TORCH = """
model = initialize(model)
optimizers = make_optimizers(model)
schedules = [torch.optim.lr_scheduler.LambdaLR(one, factor) for one in optimizers]
"""

_USE_HUGGING_FACE = """
model = initialize(model)
trainer = Trainer(model, arguments, optimizer_cls_and_kwargs=(OptimizerFactory, {}), ...)
trainer = Trainer(model, arguments, optimizers=(make_optimizer(model), None), ...)    # or this
"""


def _torch(content: Content) -> tuple[str, Sequence[str]]:
    return _write(content, "torch", _TORCH, _USE_TORCH)


def _hugging_face(content: Content) -> tuple[str, Sequence[str]]:
    return _write(content, "transformers", _HUGGING_FACE, _USE_HUGGING_FACE)


FORMATS = (
    Format("torch", "torch.optim", (".py",), _torch),
    Format("huggingface", "the Trainer of transformers", (".py",), _hugging_face),
)
