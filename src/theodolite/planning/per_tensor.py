"""`PerTensor`: a row for each tensor of a network, and the parameter groups and the optimizer they make.

What `Plan` and `Groups` have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS, Planned
from theodolite.optimizers.sharding import replicas_of
from theodolite.optimizers.spec import Make
from theodolite.planning.exporting import Exported, export
from theodolite.planning.rows import Options, PlanRow, param_groups, trained_tensors
from theodolite.present.result import Result


class PerTensor(Result):
    """Hyperparameters for each tensor of a network."""

    _noun: ClassVar[str] = "plan"
    """What it is called in errors."""

    optimizer_name: str
    lr: float
    weight_decay: float
    options: Mapping[str, Any]
    vector_options: Mapping[str, Any]
    rows: Mapping[str, PlanRow]
    multipliers: Mapping[str, float]

    def __getitem__(self, name: str) -> PlanRow:
        try:
            return self.rows[name]
        except KeyError:
            these = "these" if self._noun.endswith("s") else "this"
            raise UseError(f"{name!r} is not a tensor of {these} {self._noun}") from None

    @property
    def trained(self) -> tuple[PlanRow, ...]:
        """The rows of the tensors that are trained: all but those that are `frozen` or `unused`."""
        return tuple(row for row in self.rows.values() if row.trained)

    def match(self, model: nn.Module) -> dict[str, Tensor]:
        """The network's tensors by canonical name, in the order of the rows; wrappers are looked through.

        A network with other tensors or shapes is refused with a message that names them.

        >>> import torch, theodolite as th
        >>> tokens = torch.zeros(1, 8, dtype=torch.long)
        >>> plan = th.plan(th.models.GPT, tokens, size=th.Size(64, 2), base=th.Size(64, 2), lr=1e-3)
        >>> plan.match(th.models.GPT(64, 2, vocab=99))
        Traceback (most recent call last):
        theodolite.UseError: the plan is for width 64, depth 2 and does not fit this GPT.
        2 of another shape: embed.weight is (99, 64), planned (256, 64); readout.weight is (99, 64), ...
        Plan for this network, or build the network at the plan's size
        """
        if not isinstance(model, nn.Module):
            raise UseError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
        tensors = dict(canonical_parameters(model))
        culprits = {
            "not in the network": [name for name in self.rows if name not in tensors],
            f"not in the {self._noun}": [name for name in tensors if name not in self.rows],
            "of another shape": [
                f"{name} is {tuple(tensors[name].shape)}, planned {row.shape}"
                for name, row in self.rows.items()
                if name in tensors and tuple(tensors[name].shape) != tuple(row.shape)
            ],
        }
        if any(culprits.values()):
            lines = [
                f"{len(names)} {what}: {'; '.join(names[:3] + ['…'] * (len(names) > 3))}."
                for what, names in culprits.items()
                if names
            ]
            made, remedy = self._made_for()
            raise UseError(f"{made} fit this {type(model).__name__}.\n" + "\n".join(lines) + f"\n{remedy}")
        return {name: tensors[name] for name in self.rows}

    def param_groups(self, model: nn.Module, *, skip: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Plain parameter groups, equal rows merged. `skip` holds patterns of tensors to leave out.

        Beside `params`, `param_names`, `lr` and `weight_decay` a group has a `name` for loggers, what its
        optimizer calls eps and the options given, the `rule` that gave the numbers, and `planned_lr`, by
        which the ratios between groups can be checked later.

        >>> import torch, theodolite as th
        >>> tokens = torch.zeros(1, 8, dtype=torch.long)
        >>> plan = th.plan(th.models.GPT, tokens, size=th.Size(64, 2), base=th.Size(64, 2), lr=0.25)
        >>> groups = plan.param_groups(th.models.GPT(64, 2))
        >>> len(groups), groups[0]["lr"], groups[0]["name"]       # at base size all tensors are alike
        (1, 0.25, 'input+gain+hidden+output')
        """
        tensors = trained_tensors(self.trained, self.match(model), skip, self._noun)
        return param_groups(self.rows, tensors, self._options())

    def optimizer(
        self,
        model: nn.Module,
        *,
        skip: Sequence[str] = (),
        make: Make | None = None,
        check_gradients: bool = True,
    ) -> Optimizer:
        """One torch optimizer for all tensors, whatever the number of rules.

        Args:
            model: the network.
            skip: patterns of tensors to leave out.
            make: turns parameter groups into an optimizer, for a rule of your own. What a matrix optimizer
                leaves to AdamW stays there.
            check_gradients: refuse a step along a gradient that is not finite, with the tensor's name. For
                this check a step waits for the device.
        """
        own = self.optimizer_name
        if make is None and own not in OPTIMIZERS:
            raise UseError(
                f"{own} is a rule of yours, so there is no optimizer for it here: "
                "plan.optimizer(model, make=lambda groups: YourOptimizer(groups))"
            )
        groups, options = self.param_groups(model, skip=skip), self._options()
        replicas = replicas_of(model)  # the replicas of a DistributedDataParallel model share Muon's work
        makes: dict[str, Callable[..., Optimizer]] = {
            rule: make
            if make is not None and rule == own
            else OPTIMIZERS[rule].maker(options[rule], shared_over=replicas)
            for rule in dict.fromkeys(group["rule"] for group in groups)
        }
        defaults = {"lr": self.lr, "weight_decay": self.weight_decay}
        return Planned(groups, makes, defaults=defaults, check_gradients=check_gradients)

    def export(self, format: str, *, names: Mapping[str, str] | None = None) -> Exported:
        """All of it as a text for another trainer, or as a table: `theodolite.planning.exporting.export`.

        Args:
            format: `torch`, `huggingface`, `torchtitan`, `deepspeed`, `dion`, `megatron`, `csv`, `markdown`
                or `yaml`.
            names: what the tensors are called there, by patterns of their names here.
        """
        return export(self, format, names=names)

    def _options(self) -> Options:
        return {
            row.rule: self.options if row.rule == self.optimizer_name else self.vector_options
            for row in self.trained
        }

    def _made_for(self) -> tuple[str, str]:
        """What it was made for, and what to do for another network: the ends of an error."""
        raise NotImplementedError
