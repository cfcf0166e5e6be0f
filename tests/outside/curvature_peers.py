"""What test_curvature_peers.py runs in the peers' environment: how far each is from the truth, as JSON.

The truth is the explicit Hessian by finite differences in float64.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "probes"))
# Only torch and theodolite are needed for these, no pytest.
from curvature.explicit import apart, explicit_of
from curvature.networks import case

from theodolite.probes.curvature.eigenvalues import eigenvalues
from theodolite.probes.curvature.operator import hessian

NETWORKS = ("tanh", "rms norm", "layer norm", "batch norm, train", "group norm")
TOP = 3


def ours(made, eye):
    found = hessian(made.model, made.loss, made.batch)
    return {"hessian": found @ eye, "gauss_newton": found.gauss_newton @ eye}


def curvlinops(made, eye):
    from curvlinops import GGNLinearOperator, HessianLinearOperator

    # It asks the loss for its reduction.
    loss = torch.nn.CrossEntropyLoss()
    parameters = list(made.model.parameters())
    given = (made.model, loss, parameters, [made.batch])
    found = {}
    for name, kind in (("hessian", HessianLinearOperator), ("gauss_newton", GGNLinearOperator)):
        try:
            found[name] = kind(*given, check_deterministic=False) @ eye
        except Exception as error:
            found[name] = error
    return found


def pyhessian(made, eye):
    from pyhessian import hessian, hessian_vector_product

    training = made.model.training
    peer = hessian(made.model, made.loss, data=made.batch, cuda=False)
    made.model.train(training)
    sizes = [parameter.numel() for parameter in peer.params]

    def product(vector):
        pieces = zip(vector.split(sizes), peer.params, strict=True)
        vectors = [piece.view_as(parameter) for piece, parameter in pieces]
        return torch.cat([one.flatten() for one in hessian_vector_product(peer.gradsH, peer.params, vectors)])

    return {"hessian": torch.stack([product(column) for column in eye], 1)}


def eigenthings(made, eye):
    from hessian_eigenthings import GGNOperator, HessianOperator
    from hessian_eigenthings.loss_fns import (
        supervised_forward,
        supervised_loss,
        supervised_loss_of_output,
    )

    whole = HessianOperator(made.model, [made.batch], supervised_loss(made.loss))
    found = {"hessian": torch.stack([whole.matvec(column) for column in eye], 1)}
    part = GGNOperator(made.model, [made.batch], supervised_forward, supervised_loss_of_output(made.loss))
    found["gauss_newton"] = torch.stack([part.matvec(column) for column in eye], 1)
    return found


PEERS = {"ours": ours, "curvlinops": curvlinops, "pyhessian": pyhessian, "eigenthings": eigenthings}


def products(name):
    """For each package and matrix the relative error, or what it raised."""
    expected, found = explicit_of(name), {}
    eye = torch.eye(sum(expected.sizes), dtype=torch.float64)
    for peer, measure in PEERS.items():
        try:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                matrices = measure(case(name), eye)
        except Exception as error:
            found[peer] = repr(error)
            continue
        found[peer] = {
            kind: repr(matrix) if isinstance(matrix, Exception) else apart(matrix, getattr(expected, kind))
            for kind, matrix in matrices.items()
        }
    return found


def top(name):
    """The largest eigenvalues in magnitude by each package, and those of the explicit matrix."""
    from hessian_eigenthings import HessianOperator, lanczos
    from hessian_eigenthings.loss_fns import supervised_loss
    from pyhessian import hessian as pyhessian

    made = case(name)
    whole = torch.linalg.eigvalsh(explicit_of(name).hessian)
    expected = whole[whole.abs().argsort(descending=True)][:TOP]
    found = {"explicit": expected.tolist()}
    reading = eigenvalues(made.model, made.loss, made.batch, k=TOP, which="magnitude", rtol=1e-8)
    found["ours"] = reading.values.tolist()
    # Its vectors are of the default dtype.
    torch.set_default_dtype(torch.float64)
    peer = pyhessian(made.model, made.loss, data=made.batch, cuda=False)
    found["pyhessian"] = peer.eigenvalues(maxIter=5000, tol=1e-9, top_n=TOP)[0]
    torch.set_default_dtype(torch.float32)
    operator = HessianOperator(made.model, [made.batch], supervised_loss(made.loss))
    found["eigenthings"] = lanczos(operator, k=TOP, max_iter=operator.size, seed=0).eigenvalues.tolist()
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {"products": {name: products(name) for name in NETWORKS}, "top": top("tanh")}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
