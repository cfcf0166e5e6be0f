"""How the residual stream changes from block to block, at the start and during training.

    python examples/stream.py

Put your own model, loss and batch in the place of those below. Takes a few seconds.
"""

import torch

import theodolite as th

torch.manual_seed(0)
torch.set_num_threads(1)  # a network this small only waits for threads

workload = th.workload("gpt-sotu")
tokens, targets = workload.batch(0, 0)
batch = tokens[:2, :32], targets[:2, :32]

# Every branch of every block, and the loss without it.
model = th.models.GPT(64, 4)
print(th.probes.stream(model, workload.loss, batch))
print()

# Two laws of growth: linear and exponential.
for placement in ("pre", "post", "peri", "none"):
    deeper = th.models.GPT(64, 8, norm_placement=placement)
    found = th.probes.stream(deeper, workload.loss, batch, skip=False)
    print(f"{placement:<5} {found.growth}")

# In your own loop: record whenever you like. history.save("stream.html") draws depth × step.
print()
history = th.probes.StreamHistory(model, workload.loss, batch)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(21):
    if step % 10 == 0:
        history.record(step)
    optimizer.zero_grad()
    workload.loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
print(history)
