"""The loss around a trained network, and the path of training.

    python examples/landscape.py

Trains a small network with batch norms on two spirals, measures its sharpness during training, keeps a
checkpoint every 20 steps, and draws the loss on their principal plane. Takes a few seconds.
`landscape.html` and `track.html` open in any browser.
"""

import math

import torch
from torch import nn

import theodolite as th

torch.manual_seed(0)
torch.set_num_threads(1)  # a network this small only waits for threads
torch.set_default_dtype(torch.float64)

# Two spirals, a class each.
angle = 1.5 * math.pi * torch.rand(256).sqrt()
label = torch.arange(256) % 2
turned = angle + math.pi * label
points = torch.stack([angle * turned.cos(), angle * turned.sin()], 1) / 9 + 0.02 * torch.randn(256, 2)
batch = points, label

model = nn.Sequential(
    nn.Linear(2, 32, bias=False),
    nn.BatchNorm1d(32),
    nn.Tanh(),
    nn.Linear(32, 32, bias=False),
    nn.BatchNorm1d(32),
    nn.Tanh(),
    nn.Linear(32, 2),
)
loss = nn.functional.cross_entropy
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

checkpoints = []
with th.probes.track(model, loss, batch, optimizer, measure=["loss", "sharpness"], every=50) as tracking:
    for step in range(200):
        if step % 20 == 0:
            checkpoints.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        optimizer.zero_grad()
        loss(model(points), label).backward()
        optimizer.step()
checkpoints.append(model.state_dict())

for row in tracking.rows:
    print(f"step {row.step:>3}: loss {row.values['loss']:.3g}, sharpness {row.values['sharpness']:.1f}")
print()

model.eval()
path = th.probes.trajectory(model, checkpoints)
landscape = th.probes.landscape(model, loss, batch, axes=path)
print(landscape)

tracking.save("track.html")
landscape.save("landscape.html")
