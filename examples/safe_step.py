"""The radius of the next step, and an optimizer whose steps stay within it.

    python examples/safe_step.py

Put your own model, loss and batches in the place of those below. Takes a few seconds.
"""

import torch
from torch import nn

import theodolite as th

torch.manual_seed(0)
torch.set_num_threads(1)  # a network this small only waits for threads

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
# A cross-entropy of the softmax of the logits: other losses have no such radius and are refused.
loss = nn.functional.cross_entropy
mixture = th.data.mixture()
batches = list(zip(mixture.values.split(128), mixture.labels.split(128), strict=True))


def train(optimizer, step):
    """Sixty steps, with a learning rate a thousand times too large in five of them."""
    usual, losses = optimizer.param_groups[0]["lr"], []
    for count, (inputs, targets) in enumerate(batches[:60]):
        optimizer.param_groups[0]["lr"] = usual * (1000 if 30 <= count < 35 else 1)
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        step((inputs, targets))
        losses.append(value.item())
    # Without a limit the end is chaotic and differs between machines.
    end = f"{losses[-1]:.3f}" if losses[-1] < 10 else "far above 10"
    return f"loss before the spike {losses[29]:.3f}, at the end {end}"


# The step that an optimizer would make now, its radius, and the loss along it.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs, targets = batches[0]
loss(model(inputs), targets).backward()
print(th.probes.profile(model, loss, (inputs, targets), optimizer))
print()

start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
print("AdamW:   ", train(optimizer, lambda batch: optimizer.step()))

model.load_state_dict(start)
safe = th.controllers.SafeStep(torch.optim.AdamW(model.parameters(), lr=1e-3), model, loss, limit=1.0)
print("SafeStep:", train(safe, safe.step))
print(safe.report)
