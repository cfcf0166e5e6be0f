"""The curvature of the loss at initialisation, and whether it lies in the Goldilocks zone.

    python examples/curvature.py

Put your own model, loss and batch in the place of the three below. Takes a few seconds.
"""

import torch
from torch import nn

import theodolite as th

torch.manual_seed(0)
torch.set_num_threads(1)  # a network this small only waits for threads

# Any module, in train or in eval mode as it is.
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
# Any function loss(logits, targets) that returns one number.
loss = nn.functional.cross_entropy
# A pair (inputs, targets), or several: a list of pairs, a DataLoader.
mixture = th.data.mixture(classes=10, dimensions=64)
batch = mixture.values[:128], mixture.labels[:128]

# The Hessian, as an operator.
hessian = th.probes.hessian(model, loss, batch)
steepest = hessian.gradient / hessian.gradient.norm()
print(hessian)
print(f"curvature along the gradient {steepest @ (hessian @ steepest):.3f}")
print()

# In fifty random directions, with estimates for the whole Hessian.
print(th.probes.curvature(model, loss, batch))
print()

# In the sharpest direction.
print(th.probes.sharpness(model, loss, batch))
print()

# Divide the logits by T: all temperatures in one pass. Multiply the weights by α: one pass for each.
temperatures, scales = [10, 1, 0.1, 0.01], [0.3, 1, 3, 10]
for found in th.probes.along_temperature(model, loss, batch, temperatures):
    print(f"T {found.temperature:<5g} excess {found.excess:.2f}, t {found.t}")
for scale, found in zip(scales, th.probes.along_scale(model, loss, batch, scales), strict=True):
    print(f"α {scale:<5g} excess {found.excess:.2f}, t {found.t}")
