"""One call at a time, outside the caller's autocast."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite import probes
from theodolite.core.exclusive import exclusive

from ..faults import attack_autocast, calls


def test_every_probe_is_attacked_inside_autocast_and_in_threads() -> None:
    functions = {name for name in probes.__all__ if not isinstance(getattr(probes, name), type)}
    assert functions == set(calls.PROBES)


def test_autocast_is_as_before_after_an_error() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        before = attack_autocast._flags()
        with pytest.raises(th.UseError):
            probes.scaled(nn.Linear(1, 1), -1.0).__enter__()
        with pytest.raises(ZeroDivisionError), exclusive():
            raise ZeroDivisionError
        assert attack_autocast._flags() == before == (True, torch.bfloat16, True, 1)


def test_an_autocast_made_before_sees_new_weights_inside() -> None:
    """As a decorator makes it: once, with its cache on."""
    half = torch.autocast("cpu", torch.bfloat16)
    layer, ones = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    found = []
    with torch.autocast("cpu", torch.bfloat16), exclusive():
        for value in (1.0, 2.0):
            nn.init.constant_(layer.weight, value)
            with half:
                found.append(layer(ones))
    assert [(one.item(), one.dtype) for one in found] == [(1.0, torch.bfloat16), (2.0, torch.bfloat16)]


def test_autocast_in_the_network_itself_is_respected() -> None:
    model = calls.network()
    plain = probes.curvature(model, calls.LOSS, calls.BATCH, directions=3)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # type: ignore[method-assign]
    half = probes.curvature(model, calls.LOSS, calls.BATCH, directions=3)
    with torch.autocast("cpu", torch.bfloat16):
        inside = probes.curvature(model, calls.LOSS, calls.BATCH, directions=3)
    assert inside.loss == half.loss != plain.loss
    assert torch.equal(inside.hessian.matrix, half.hessian.matrix)


def test_a_call_waits_for_another_threads_and_not_for_its_own() -> None:
    entered, order = threading.Event(), []

    def other() -> None:
        entered.set()
        with exclusive():
            order.append("other")

    thread = threading.Thread(target=other)
    with exclusive():
        thread.start()
        assert entered.wait(60)
        with exclusive():
            order.append("own")
    thread.join()
    assert order == ["own", "other"]


def test_a_block_of_scaled_keeps_no_other_thread_waiting() -> None:
    model, other, found = calls.network(), calls.network(), []
    with probes.scaled(model, 2.0):
        thread = threading.Thread(target=lambda: found.append(probes.radius(other, calls.LOSS, calls.BATCH)))
        thread.start()
        thread.join(60)
    assert len(found) == 1


def test_a_second_thread_cannot_scale_what_is_scaled() -> None:
    model, found = calls.network(), []

    def scale() -> None:
        try:
            with probes.scaled(model, 3.0):
                pass
        except th.UseError as error:
            found.append(str(error))

    before = [parameter.detach().clone() for parameter in model.parameters()]
    with probes.scaled(model, 2.0), probes.scaled(model, 0.5):  # one thread may, and they come apart in order
        thread = threading.Thread(target=scale)
        thread.start()
        thread.join()
    scale()
    assert len(found) == 1
    assert "another thread" in found[0]
    assert all(map(torch.equal, before, model.parameters()))
