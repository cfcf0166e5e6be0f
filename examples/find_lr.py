"""Find the learning rates at which your model can be trained with your optimizer and your data.

    python examples/find_lr.py

Put your own model, optimizer, data and loss in the place of those below. Takes a few seconds.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import theodolite as th

torch.manual_seed(0)
torch.set_num_threads(1)  # a network this small only waits for threads

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
mixture = th.data.mixture(classes=10, dimensions=64)
data = DataLoader(TensorDataset(mixture.values, mixture.labels), batch_size=64, shuffle=True)

# Groups keep their ratios: here the last layer learns ten times as slowly as the rest.
optimizer = torch.optim.AdamW(
    [{"params": model[:4].parameters()}, {"params": model[4:].parameters(), "lr": 1e-4}]
)

found = th.find_lr(model, nn.functional.cross_entropy, data, optimizer=optimizer)
print(found)
print()
print(f"Multiply the learning rates by {found.factor:.3g}.")

# Model, optimizer and data are as they were; now set the rates.
for group, lr in zip(optimizer.param_groups, found.rates.values(), strict=True):
    group["lr"] = lr
