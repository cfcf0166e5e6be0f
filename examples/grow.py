"""Would one more block help a trained network, where, and how sure is that?

    python examples/grow.py

Put in your own model, loss and data. Takes a few seconds.
"""

import torch

import theodolite as th
from theodolite.growing import split

torch.manual_seed(0)
torch.set_num_threads(1)  # more threads do not help a network this small

# A network that has been trained for a while.
workload = th.workload("gpt-sotu")
model = th.models.GPT(32, 2, context=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(60):
    tokens, targets = workload.batch(0, step)
    optimizer.zero_grad()
    workload.loss(model(tokens[:, :32]), targets[:, :32]).backward()
    optimizer.step()

# Examples that it was not trained on, split in three: to estimate, to choose, to certify.
drawn = [workload.draw_held_out(index) for index in range(24)]
splits = split([(tokens[:, :32], targets[:, :32]) for tokens, targets in drawn])

# In place: the model gets one more block, if one helps, and the optimizer trains it too.
grown = th.grow(model, workload.loss, splits, method="betting", optimizer=optimizer)
print(grown)
trained = sum(len(group["params"]) for group in optimizer.param_groups)
print(f"\n{len(model.blocks)} blocks; the optimizer trains {trained} tensors")
