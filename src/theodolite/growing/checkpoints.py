"""Networks that are grown on disk: read, and written so that they can be built and read again."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from theodolite.anatomy.names import all_parameter_names, unwrap
from theodolite.core.batches import Batch
from theodolite.core.building import build_model, in_one_line, untouched_randomness
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.files import replacing
from theodolite.core.size import Size
from theodolite.planning.plan import Plan
from theodolite.planning.readout_multiplier import MARK, attach_multipliers, attached, checked, missing
from theodolite.surgery.blocks import make_block, put_block
from theodolite.surgery.inserting import rebuild
from theodolite.surgery.insertion_points import find_points
from theodolite.surgery.proof import output_difference, respond
from theodolite.workloads import Workload
from theodolite.workloads import workload as look_up
from theodolite.workloads.builtin import next_token_loss
from theodolite.workloads.hugging_face import read_config


@dataclass(frozen=True)
class Checkpoint:
    """A trained network, and where it is from. Made by `load_folder` and `load_file`."""

    model: nn.Module = field(repr=False)
    loss: Loss = field(repr=False)
    path: Path
    workload: Workload | None = None
    spec: str = ""
    """What the workload was looked up by."""
    size: Size | None = None
    """It is built at; blocks that were inserted later not counted."""
    inserted: tuple[str, ...] = ()
    """Blocks that were inserted later, where no build makes them: in order."""
    multipliers: Mapping[str, float] = field(default_factory=dict)
    """On the model: what tied readouts read is multiplied by, as when it was trained."""

    @property
    def name(self) -> str:
        """In a few words."""
        return f"{self.path.name} ({self.spec}, {self.size})" if self.workload else self.path.name


def load_folder(path: Path, device: str = "cpu", plan: Plan | None = None) -> Checkpoint:
    """A causal language model of transformers, from the folder that `save_pretrained` wrote.

    It gets the multipliers that its config names, or those of the plan that it was trained under.
    """
    try:
        import transformers
    except ImportError:
        raise UseError(
            "a Hugging Face checkpoint needs the package transformers: pip install 'theodolite[hf]'"
        ) from None
    read_config(path)
    try:
        # No code and no pickle of the folder is run.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:
        raise UseError(
            f"{path}: transformers could not read a causal language model: {in_one_line(error)}"
        ) from error
    made: nn.Module = model
    multipliers = _multiply(made, missing(made), plan, path)
    return Checkpoint(made.to(device), next_token_loss, path, multipliers=multipliers)


@exclusive()
def load_file(
    path: Path,
    workload: Workload | str | None,
    width: int | None = None,
    depth: int | None = None,
    device: str = "cpu",
    plan: Plan | None = None,
) -> Checkpoint:
    """The weights of a workload's network, as safetensors.

    If the file says which multipliers the network was trained with, as `save_file` notes them, they are put
    on it. If it says nothing, and the readout may be tied, there is a warning.

    Args:
        path: the file.
        workload: the workload, or what it is looked up by. It is never taken from the file: a file of
            weights does not decide which code is run.
        width: what the network is built at; the file's own if not given, else the workload's.
        depth: likewise.
        device: where the network is put.
        plan: that the network was trained under, if the file does not know its multipliers.
    """
    about, tensors = _read(path)
    if workload is None:
        said = f" (the file says {about['workload']!r}, which is not run)" if "workload" in about else ""
        raise UseError(f"{path} holds weights alone{said}: give --workload, a built-in name or file.py:name")
    spec = workload if isinstance(workload, str) else workload.name
    chosen = look_up(workload) if isinstance(workload, str) else workload
    size = Size(
        width or about.get("width") or chosen.size.width, depth or about.get("depth") or chosen.size.depth
    )
    inserted = tuple(about.get("inserted", ()))
    model = build_model(chosen.build, size, seed=0)
    _insert_again(model, chosen, inserted)
    _fill(model, tensors, path, size)
    multipliers = _multiply(model, checked(about, str(path)), plan, path)
    if not (about or multipliers or plan):
        _warn_of_ties(model, path)
    return Checkpoint(model.to(device), chosen.loss, path, chosen, spec, size, inserted, multipliers)


def save_file(model: nn.Module, path: str | Path, *, size: Size | None = None) -> Path:
    """Write the weights of a network as safetensors, for `load_file` and `theodolite grow`.

    Beside the weights the file holds the multipliers that a plan put on the network, without which it would
    be read as another one, and the size that it is built at, if that is given.
    """
    path = Path(path).expanduser()
    if path.suffix != ".safetensors":
        raise UseError(f"{path}: the name of a file of weights must end in .safetensors")
    facts = {} if size is None else {"width": size.width, "depth": size.depth}
    _write(path, unwrap(model), facts)
    return path


def _multiply(
    model: nn.Module, told: Mapping[str, float], plan: Plan | None, path: Path
) -> Mapping[str, float]:
    """Put multipliers on a network that was read: those that its file tells of, or those of its plan."""
    if plan is not None:
        if told and dict(told) != dict(plan.multipliers):
            raise UseError(
                f"{path} says that it was trained with the multipliers {dict(told)}, and the plan has "
                f"{dict(plan.multipliers)}: give the plan that it was trained under, or none"
            )
        if not told:  # else blocks may have been inserted since, which the plan does not know
            plan.match(model)
            plan.attach(model)
    if told:
        attach_multipliers(model, told, of=str(path))
    return attached(model)


def _warn_of_ties(model: nn.Module, path: Path) -> None:
    """Warn of a tied tensor, if nothing is known of multipliers."""
    names: dict[int, list[str]] = {}
    for name, tensor in all_parameter_names(model):
        names.setdefault(id(tensor), []).append(name)
    tied = [f"{first} is {others[0]} too" for first, *others in names.values() if others]
    if tied:
        warnings.warn(
            f"{path} does not say whether its network was trained under a plan, and {tied[0]}: then the "
            "readout had a multiplier, without which it is another network. If it was, give the plan "
            "(--plan). If it was not, or the weights are baked, write them with "
            "theodolite.growing.save_file, which says so",
            stacklevel=3,
        )


def save(checkpoint: Checkpoint, model: nn.Module, inputs: Any, blocks: Sequence[str], path: Path) -> str:
    """Write a network that has grown; what was written, in one sentence.

    A Hugging Face model is written as one, with its config. Another one is written as a build at its new
    depth would have it, if there is such a build. Else the file has the weights and the names of the new
    blocks, and `load_file` inserts them again.
    """
    if checkpoint.workload is None or checkpoint.size is None:
        return _save_folder(checkpoint, model, inputs, path)
    size = Size(checkpoint.size.width, checkpoint.size.depth + len(blocks))
    about: dict[str, Any] = {"workload": checkpoint.spec, "width": size.width}
    target = None if checkpoint.inserted else _rebuilt(checkpoint.workload, model, inputs, size)
    if target is not None:
        _write(path, target, {**about, "depth": size.depth})
        return f"{path}: the weights of build({size.width}, {size.depth})"
    names = [*checkpoint.inserted, *blocks]
    _write(path, model, {**about, "depth": checkpoint.size.depth, "inserted": names})
    return (
        f"{path}: the weights of build({size.width}, {checkpoint.size.depth}) with the blocks "
        f"{', '.join(names)} inserted, which no build makes: theodolite.growing.load_file reads it"
    )


def _rebuilt(workload: Workload, model: nn.Module, inputs: Any, size: Size) -> nn.Module | None:
    """The network as its build makes it at the new depth; None if no build does.

    None has one block more in one stage alone, or one without the norm of its sum.
    """
    try:
        target = build_model(workload.build, size, seed=0).to(next(model.parameters()).device)
        attach_multipliers(target, attached(model))
        return rebuild(model, target, inputs)[0]
    except UseError:
        return None


def check_target(checkpoint: Path, path: Path) -> None:
    """Refuse a place that a grown network cannot be written to, before any work is done."""
    folder = (checkpoint / "config.json").is_file()
    if path.exists():
        raise UseError(f"--write {path} is there already: give a name that is not")
    if not path.absolute().parent.is_dir():
        raise UseError(f"--write {path}: there is no folder {path.parent}")
    if not folder and path.suffix != ".safetensors":
        raise UseError(f"--write {path}: its name must end in .safetensors")


def _save_folder(checkpoint: Checkpoint, model: nn.Module, inputs: Any, path: Path) -> str:
    """Write beside, read again, compare, and only then rename: configs may say of layers what has moved."""
    inner: Any = unwrap(model)
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name}-") as beside:
        part = Path(beside) / path.name
        inner.save_pretrained(part)
        for file in checkpoint.path.iterdir():  # tokenizers and what else lies beside the weights
            weights = file.suffix in (".safetensors", ".bin", ".pt", ".gguf") or file.name.endswith(
                ".index.json"
            )
            if file.is_file() and not weights and not (part / file.name).exists():
                shutil.copy2(file, part / file.name)
        again = load_folder(part, str(next(inner.parameters()).device)).model
        before, after = respond(inner, inputs), respond(again, inputs)
        assert before is not None
        assert after is not None
        if output_difference(before.outputs, after.outputs) > 0:
            raise UseError(
                f"{path} was not written: read again from its config, the grown {type(inner).__name__} "
                "computes something else, as the config says of layers by number what has moved (which of "
                "them have experts, or norms behind their sums). Keep the model in memory: theodolite.grow"
            )
        part.rename(path)
    return f"{path}: a Hugging Face model of {inner.config.num_hidden_layers} layers"


def build_again(checkpoint: Checkpoint, seed: int) -> nn.Module:
    """The network as it was before training, with the blocks that were inserted later."""
    device, dtype = (getattr(next(checkpoint.model.parameters()), name) for name in ("device", "dtype"))
    if checkpoint.workload is not None and checkpoint.size is not None:
        made = build_model(checkpoint.workload.build, checkpoint.size, seed=seed)
        _insert_again(made, checkpoint.workload, checkpoint.inserted)
    else:
        with untouched_randomness(seed):
            made = type(checkpoint.model)(checkpoint.model.config)
    return made.to(device, dtype)


def _insert_again(model: nn.Module, workload: Workload, names: Sequence[str]) -> None:
    for name in names:
        inputs, _ = workload.draw(0, 0)
        point = find_points(model, inputs).at(name)
        put_block(model, point, make_block(model, point))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file of safetensors says of itself, and its tensors."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(MARK, "{}"))
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except Exception as error:
        raise UseError(f"{path} cannot be read as safetensors: {in_one_line(error)}") from error
    sizes = [about.get(name, 1) for name in ("width", "depth")] if isinstance(about, dict) else [0]
    names = about.get("inserted", []) if isinstance(about, dict) else []
    if not all(type(size) is int and size > 0 for size in sizes) or not (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and len(names) <= len(tensors)
    ):
        raise UseError(
            f"{path} says of itself {json.dumps(about):.80}, which no grown network does: write it again "
            "with safetensors.torch.save_model, and give --width and --depth"
        )
    return about, tensors


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], path: Path, size: Size) -> None:
    from safetensors.torch import load_model

    wanted = model.state_dict()
    odd = [name for name in tensors if name not in wanted]
    wrong = [name for name in tensors if name in wanted and tensors[name].shape != wanted[name].shape]
    if odd or wrong:
        name = (odd or wrong)[0]
        said = "is not in the network" if odd else f"has the shape {tuple(wanted[name].shape)} there"
        raise UseError(
            f"{path}: {name} {tuple(tensors[name].shape)} {said} at {size}: give --width and --depth"
        )
    missing, _ = load_model(model, path, strict=False)
    if missing:
        raise UseError(
            f"{path} lacks {sorted(missing)[0]} and {len(missing) - 1} more of the network at {size}"
        )


def _write(path: Path, model: nn.Module, about: Mapping[str, Any]) -> None:
    """Write the weights, with what is known of the network, its multipliers among it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    about = {**about, "multipliers": attached(model)}
    try:
        with replacing(path) as part:
            save_model(model, str(part), {MARK: json.dumps(about)})
    except (OSError, SafetensorError) as error:
        raise UseError(f"{path} cannot be written: {in_one_line(error)}") from error


def example(batches: Sequence[Batch]) -> Any:
    """Inputs of two units."""
    from theodolite.core.examples import each_batch, take

    return take(next(iter(each_batch(batches))), slice(0, 2))[0]
