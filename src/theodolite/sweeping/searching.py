"""A search instead of a grid: Optuna is asked for settings and told how they did."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from theodolite.core.optional import needed
from theodolite.sweeping.ranges import Range

Settings = dict[str, Any]
"""By axis, one value of each."""
Space = Mapping[str, Sequence[Any] | Range]
"""By axis, a range, or values to choose from."""

NUM_ASKS = 5
"""Settings that are asked for at a time, so that an engine runs them together. A part of what a search is:
another number would give other settings."""


def search(
    space: Space, evaluate: Callable[[Sequence[Settings]], Sequence[float]], *, trials: int, seed: int = 0
) -> list[tuple[Settings, float]]:
    """Settings with their losses, in the order of asking, by a tree-structured Parzen estimator (TPE).

    The same space, seed and losses give the same settings. So a search that was stopped is taken up again by
    doing it again, if `evaluate` knows the losses of what was run before.

    Args:
        space: what to choose from.
        evaluate: the loss of each of a few settings; infinite where it diverged or failed, so that
            such settings are kept away from.
        trials: how many settings to try.
        seed: of the sampler.
    """
    optuna = _optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Settings that are still being run count as bad ones, so that those asked for together differ.
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    tried: list[tuple[Settings, float]] = []
    while len(tried) < trials:
        asked = [study.ask() for _ in range(min(NUM_ASKS, trials - len(tried)))]
        settings = [{name: _suggest(trial, name, among) for name, among in space.items()} for trial in asked]
        for trial, chosen, loss in zip(asked, settings, evaluate(settings), strict=True):
            tried.append((chosen, loss))
            study.tell(trial, loss)
    return tried


def _suggest(trial: Any, name: str, among: Sequence[Any] | Range) -> Any:
    if isinstance(among, Range):
        return trial.suggest_float(name, among.low, among.high, log=among.log)
    index = trial.suggest_categorical(name, list(range(len(among))))
    return among[index]


def _optuna() -> Any:
    optuna = needed("optuna", "optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
