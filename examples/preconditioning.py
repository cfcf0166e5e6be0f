"""What a norm's gain does to the learning rate of the maps behind it, and how that grows in training.

    python examples/preconditioning.py

Put your own model, loss and batch in the place of the three below. Takes a few seconds.
"""

import torch

import theodolite as th
from theodolite.workloads import next_token_loss

torch.manual_seed(0)
torch.set_num_threads(1)  # a network this small only waits for threads

model = th.models.GPT(64, 1, context=64)
workload = th.workload("gpt-sotu")
batch = tuple(tokens[:8, :64] for tokens in workload.batch(0, 0))
optimizer = torch.optim.AdamW(model.parameters(), lr=2**-8, weight_decay=0.1)

print(th.probes.preconditioning(model, next_token_loss, batch, optimizer=optimizer))
print()

# Look every so many steps of your own loop.
growth = th.probes.amplification(model, batch[0])
for step in range(101):
    if step % 50 == 0:
        growth.record(step)
    tokens, targets = (each[:8, :64] for each in workload.batch(0, step))
    optimizer.zero_grad()
    next_token_loss(model(tokens), targets).backward()
    optimizer.step()
print(growth)
