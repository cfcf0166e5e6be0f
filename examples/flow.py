"""Train a flow from noise to data under a plan, sample it, guide it, and jump with a flow map.

    python examples/flow.py

The data are three Gaussians in the plane, whose exact flow is known. Put your own `draw(seed, step)` and
network `model(x, t, labels)` in the place of those below. Takes a few seconds.
"""

from functools import partial

import torch

import theodolite as th
from theodolite import flows

torch.manual_seed(0)
torch.set_num_threads(1)  # a network this small only waits for threads

mixture = flows.three_gaussians()
build = partial(th.models.FlowMLP, classes=3)


def draw(seed, step):
    return mixture.sample(256, seed, step)


# Batches of noisy points, their times and labels; one label in ten is dropped, for guidance.
batch = flows.noisy(draw, classes=3, label_dropout=0.1)
plan = th.plan(build, batch(0, 0)[0], base=th.Size(32, 2), size=th.Size(64, 4), lr=2**-7)
model = plan.build(seed=0)
optimizer = plan.optimizer(model)
scheduler = plan.schedule(optimizer, "cosine", steps=300, warmup=30)
for step in range(300):
    inputs, velocity = batch(0, step)
    optimizer.zero_grad()
    flows.velocity_loss(model(*inputs), velocity).backward()
    optimizer.step()
    scheduler.step()
with torch.no_grad():
    unseen = [batch(1, step) for step in range(50)]
    losses = [flows.velocity_loss(model(*inputs), velocity) for inputs, velocity in unseen]
floor = 0.9 * mixture.floor(labelled=True) + 0.1 * mixture.floor()
print(f"loss {torch.stack(losses).mean():.2f}; no network can get below {floor:.2f}")

# Samples of one class: 3 is the label for none.
model.eval()
noise = torch.randn(1000, 2)
target = mixture.centres[1].float() + mixture.std * torch.randn(1000, 2)
for scale in (1.0, 2.0):
    field = flows.guided(flows.field_of(model, 3), flows.field_of(model, 1), scale)
    samples = flows.sample(field, noise, steps=16, method="heun")
    print(f"scale {scale:g}: {flows.sliced_wasserstein(samples, target):.2f} from the class")

# A network of two times learns to jump from noise to data at once.
jumper = th.models.FlowMLP(64, 3, times=2)
jumps, map_loss = flows.map_batches(draw), flows.map_loss("lagrangian")
optimizer = torch.optim.Adam(jumper.parameters(), lr=5e-3)
for step in range(300):
    optimizer.zero_grad()
    map_loss(jumper, jumps(0, step)).backward()
    optimizer.step()
exact = mixture.flow_map(noise.double(), 0.0, 1.0).float()
for number in (1, 4):
    found = flows.sample_map(flows.FlowMap(jumper.eval()), noise, number)
    print(f"jumps: {number}, {flows.map_error(found, exact):.1f} from the exact map")
