"""What the residual stream does from block to block, where training starts and while it goes on.

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

# Two laws of growth: by an addition in each block, or by a factor.
for placement in ("pre", "post", "peri", "none"):
    deeper = th.models.GPT(64, 8, norm_placement=placement)
    found = th.probes.stream(deeper, workload.loss, batch, skip=False)
    print(f"{placement:<5} {found.growth}")

# In your own loop: look whenever you like. course.save("stream.html") draws depth × step.
print()
course = th.probes.StreamCourse(model, workload.loss, batch)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(21):
    if step % 10 == 0:
        course.record(step)
    optimizer.zero_grad()
    workload.loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
print(course)
