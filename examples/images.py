"""Train a flow that draws clothes under a plan, and write the images that it draws as a PNG.

    python examples/images.py

The data are Fashion-MNIST; `theodolite data fetch fashion-mnist` downloads it. Put your own workload in the
place of `dit-fashion`. Takes about a minute on two cores; `python examples/images.py 2000` trains for 2000
steps instead of 500. `images.png` opens in any browser.
"""

import struct
import sys
import zlib
from pathlib import Path

import torch

import theodolite as th
from theodolite import flows

if {"-h", "--help"} & set(sys.argv):
    print(__doc__)
    sys.exit()
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
classes, scales, rows = 10, (1.0, 2.0), 2

# The learning rate is one for width 32, and the plan carries it over to width 64.
workload = th.workload("dit-fashion")
plan = th.plan(workload.build, workload.batch(0, 0)[0], base=th.Size(32, 4), size=th.Size(64, 4), lr=2**-6)
model = plan.build(seed=0)
optimizer = plan.optimizer(model)
scheduler = plan.schedule(optimizer, "cosine", steps=steps, warmup=steps // 10)
for step in range(steps):
    inputs, velocity = workload.batch(0, step)
    optimizer.zero_grad()
    loss = workload.loss(model(*inputs), velocity)
    loss.backward()
    optimizer.step()
    scheduler.step()
    if (step + 1) % 100 == 0:
        print(f"step {step + 1}: loss {loss:.2f}")

# Each class from the same noise at each scale; the label 10 stands for none.
model.eval()
noise = torch.randn(rows * classes, 1, 28, 28, generator=torch.Generator().manual_seed(0))
labels = torch.arange(classes).repeat(rows)
drawn = []
for scale in scales:
    field = flows.guided(flows.field_of(model, classes), flows.field_of(model, labels), scale)
    drawn.append(flows.sample(field, noise, steps=20, method="heun"))

# Back to grey values from 0 to 255, and one image from a grid: a class in each column.
known = th.data.fashion_mnist()
grey = (255 * (torch.cat(drawn) * known.std[0] + known.mean[0])).round().clamp(0, 255).to(torch.uint8)
grid = grey.view(-1, classes, 28, 28).transpose(1, 2).reshape(-1, classes * 28)
grid = grid.repeat_interleave(3, 0).repeat_interleave(3, 1)  # large enough to look at


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


# A grey PNG: a header, the compressed rows, each after a 0 for "no filter", and an end.
height, width = grid.shape
header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
packed = zlib.compress(b"".join(b"\0" + row.numpy().tobytes() for row in grid))
content = chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
Path("images.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
print(f"images.png: {rows} rows for each of the guidance scales {scales[0]:g} and {scales[1]:g}")
