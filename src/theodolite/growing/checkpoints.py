"""Networks on disk: read, and written so that a grown network can be built and read again."""

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
from theodolite.core.building import build_model, in_one_line, untouched_randomness
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.files import replacing
from theodolite.core.optional import needed
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
from theodolite.workloads.configs import read_config


@dataclass(frozen=True)
class SavedNetwork:
    """A trained network, and its source. Made by `load_folder` and `load_file`."""

    model: nn.Module = field(repr=False)
    loss: Loss = field(repr=False)
    path: Path
    workload: Workload | None = None
    spec: str = ""
    """The name that the workload was looked up by."""
    size: Size | None = None
    """What it is built at; later inserted blocks are not counted."""
    inserted: tuple[str, ...] = ()
    """Blocks that were inserted later and that no build makes, in order."""
    multipliers: Mapping[str, float] = field(default_factory=dict)
    """Of the inputs of tied readouts, as in training."""

    @property
    def name(self) -> str:
        """For messages and pages."""
        return f"{self.path.name} ({self.spec}, {self.size})" if self.workload else self.path.name


def load_folder(path: Path, device: str = "cpu", plan: Plan | None = None) -> SavedNetwork:
    """A causal language model of transformers, from the folder that `save_pretrained` wrote.

    It gets the multipliers in its config, or those of the plan it was trained under.
    """
    transformers = needed("transformers", "hf")
    read_config(path)
    try:
        # Neither code nor pickles of the folder are run.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:
        raise UseError(
            f"{path}: transformers could not read a causal language model: {in_one_line(error)}"
        ) from error
    made: nn.Module = model
    multipliers = _multiply(made, missing(made), plan, path)
    return SavedNetwork(made.to(device), next_token_loss, path, multipliers=multipliers)


@exclusive()
def load_file(
    path: Path,
    workload: Workload | str | None,
    width: int | None = None,
    depth: int | None = None,
    device: str = "cpu",
    plan: Plan | None = None,
) -> SavedNetwork:
    """The weights of a workload's network, as safetensors.

    The multipliers that `save_file` stored are attached. If the file has none and the readout may be tied,
    there is a warning.

    Args:
        path: the file.
        workload: the workload, or its name. It is never taken from the file: a file of weights does not
            decide which code is run.
        width: to build at; by default the file's own, else the workload's.
        depth: likewise.
        device: for the network.
        plan: the one it was trained under, if the file has no multipliers.
    """
    about, tensors = read_safetensors(path)
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
    return SavedNetwork(model.to(device), chosen.loss, path, chosen, spec, size, inserted, multipliers)


def save_file(model: nn.Module, path: str | Path, *, size: Size | None = None) -> Path:
    """Write the weights of a network as safetensors, for `load_file` and `theodolite grow`.

    The file also holds the multipliers that a plan attached, without which it would be another network, and
    the size to build at, if given.
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
    """Attach multipliers to a network that was read: those of its file, or those of its plan."""
    if plan is not None:
        if told and dict(told) != dict(plan.multipliers):
            raise UseError(
                f"{path} was trained with the multipliers {dict(told)}, but the plan has "
                f"{dict(plan.multipliers)}: give the plan it was trained under, or none"
            )
        if not told:  # else blocks may have been inserted that the plan does not know
            plan.match(model)
            plan.attach(model)
    if told:
        attach_multipliers(model, told, of=str(path))
    return attached(model)


def _warn_of_ties(model: nn.Module, path: Path) -> None:
    """Warn of a tied tensor if nothing is known about multipliers."""
    names: dict[int, list[str]] = {}
    for name, tensor in all_parameter_names(model):
        names.setdefault(id(tensor), []).append(name)
    tied = [f"{first} is {others[0]} too" for first, *others in names.values() if others]
    if tied:
        warnings.warn(
            f"{path} does not tell whether its network was trained under a plan, and {tied[0]}: under a "
            "plan the readout had a multiplier, without which this is another network. If so, give the "
            "plan (--plan). If not, or if the weights are baked, write them with "
            "theodolite.growing.save_file",
            stacklevel=3,
        )


def save(network: SavedNetwork, model: nn.Module, inputs: Any, blocks: Sequence[str], path: Path) -> str:
    """Write a grown network; returns what was written, in one sentence.

    A Hugging Face model is written as one, with its config. Another network is written as `build` makes it at
    its new depth, if it can. Else the file has the weights and the names of the new blocks, and `load_file`
    inserts them again.
    """
    if network.workload is None or network.size is None:
        return _save_folder(network, model, inputs, path)
    size = Size(network.size.width, network.size.depth + len(blocks))
    about: dict[str, Any] = {"workload": network.spec, "width": size.width}
    target = None if network.inserted else _rebuilt(network.workload, model, inputs, size)
    if target is not None:
        _write(path, target, {**about, "depth": size.depth})
        return f"{path}: the weights of build({size.width}, {size.depth})"
    names = [*network.inserted, *blocks]
    _write(path, model, {**about, "depth": network.size.depth, "inserted": names})
    return (
        f"{path}: the weights of build({size.width}, {network.size.depth}) with the blocks "
        f"{', '.join(names)} inserted, which no build makes: read it with theodolite.growing.load_file"
    )


def _rebuilt(workload: Workload, model: nn.Module, inputs: Any, size: Size) -> nn.Module | None:
    """The network as its build makes it at the new depth; None if it does not, as with one more block in one
    stage only, or without the norm after its sum."""
    try:
        target = build_model(workload.build, size, seed=0).to(next(model.parameters()).device)
        attach_multipliers(target, attached(model))
        return rebuild(model, target, inputs)[0]
    except UseError:
        return None


def check_target(checkpoint: Path, path: Path) -> None:
    """Refuse a path that a grown network cannot be written to, before any work."""
    folder = (checkpoint / "config.json").is_file()
    if path.exists():
        raise UseError(f"--write {path} exists already: give another name")
    if not path.absolute().parent.is_dir():
        raise UseError(f"--write {path}: there is no folder {path.parent}")
    if not folder and path.suffix != ".safetensors":
        raise UseError(f"--write {path}: its name must end in .safetensors")


def _save_folder(network: SavedNetwork, model: nn.Module, inputs: Any, path: Path) -> str:
    """Write, read again, compare, and only then rename: a config may name layers by number, which moved."""
    inner: Any = unwrap(model)
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name}-") as beside:
        part = Path(beside) / path.name
        inner.save_pretrained(part)
        for file in network.path.iterdir():  # tokenizers and other files
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
                "computes something else, because the config names layers by number that have moved (layers "
                "with experts, or with norms after their sums). Keep the model in memory: theodolite.grow"
            )
        part.rename(path)
    return f"{path}: a Hugging Face model of {inner.config.num_hidden_layers} layers"


def build_again(network: SavedNetwork, seed: int) -> nn.Module:
    """The network before training, with the blocks that were inserted later."""
    device, dtype = (getattr(next(network.model.parameters()), name) for name in ("device", "dtype"))
    if network.workload is not None and network.size is not None:
        made = build_model(network.workload.build, network.size, seed=seed)
        _insert_again(made, network.workload, network.inserted)
    else:
        with untouched_randomness(seed):
            made = type(network.model)(network.model.config)
    return made.to(device, dtype)


def _insert_again(model: nn.Module, workload: Workload, names: Sequence[str]) -> None:
    for name in names:
        inputs, _ = workload.draw(0, 0)
        point = find_points(model, inputs).at(name)
        put_block(model, point, make_block(model, point))


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and the tensors of a file of safetensors."""
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
            f"{path} has the metadata {json.dumps(about):.80}, which no grown network has: write it again "
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
    """Write the weights and the metadata, with the multipliers."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    about = {**about, "multipliers": attached(model)}
    try:
        with replacing(path) as part:
            save_model(model, str(part), {MARK: json.dumps(about)})
    except (OSError, SafetensorError) as error:
        raise UseError(f"{path} cannot be written: {in_one_line(error)}") from error
