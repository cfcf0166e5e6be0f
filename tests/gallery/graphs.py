"""Networks of graphs and sets."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .exhibit import Exhibit
from .layers import HEAD, SMALL_LR, Attention, Mlp

NODES, FEATURES, CLASSES, EDGE_FEATURES = 24, 6, 5, 4


class GCN(nn.Module):
    """Convolutions with a normalised adjacency; only the nodes of a mask are returned."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
        """Logits of the nodes in the mask."""
        x = F.relu(adjacency @ self.enter(x))
        for layer in self.hidden:
            x = F.relu(adjacency @ layer(x))
        return (adjacency @ self.head(x))[mask]


class GAT(nn.Module):
    """Attention by a vector for each end of an edge; two heads, which grow with the width."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [FEATURES] + [width] * depth
        self.layers = nn.ModuleList(GATLayer(a, b) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
        """Logits of the nodes in the mask."""
        for layer in self.layers:
            x = F.elu(layer(x, adjacency))
        return self.head(x)[mask]


class GATLayer(nn.Module):
    """One round of attention."""

    HEADS = 2

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Linear(before, after, bias=False)
        self.source, self.target = (
            nn.Parameter(torch.randn(1, self.HEADS, after // self.HEADS) / after**0.5) for _ in range(2)
        )
        self.bias = nn.Parameter(torch.zeros(after))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """Each node's mean of its neighbours, weighted by what both ends say."""
        h = self.weight(x).unflatten(-1, (self.HEADS, -1))
        source, target = (h * self.source).sum(-1), (h * self.target).sum(-1)
        scores = F.leaky_relu(target[:, None] + source[None], 0.2)
        scores = scores.masked_fill((adjacency == 0)[:, :, None], float("-inf"))
        return torch.einsum("ijh,jhd->ihd", scores.softmax(1), h).flatten(1) + self.bias


class GIN(nn.Module):
    """Sums over neighbours and `1 + ε` of oneself, through an MLP; a sum over the nodes at the end."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [FEATURES] + [width] * depth
        self.layers = nn.ModuleList(GINLayer(a, b) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """Logits of the graph."""
        for layer in self.layers:
            x = layer(x, adjacency)
        return self.head(x.sum(0, keepdim=True))


class GINLayer(nn.Module):
    """One round."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.first, self.second = nn.Linear(before, after), nn.Linear(after, after)
        self.norm = nn.BatchNorm1d(after)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """The node and its neighbours."""
        x = (1 + self.eps) * x + adjacency @ x
        return F.relu(self.second(F.relu(self.norm(self.first(x)))))


class MessagePassing(nn.Module):
    """Messages along edges, added up with `index_add`, change the nodes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.rounds = nn.ModuleList(Round(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        """Logits of every node."""
        x = self.enter(x)
        for one in self.rounds:
            x = one(x, edges, features)
        return self.head(x)


class Round(nn.Module):
    """Message, sum, update."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Linear(2 * width + EDGE_FEATURES, width)
        self.update, self.out = nn.Linear(2 * width, width), nn.Linear(width, width)
        nn.init.normal_(self.out.weight, std=0.02)

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        """One residual branch."""
        source, target = edges
        sent = F.relu(self.message(torch.cat((x[source], x[target], features), -1)))
        received = torch.zeros_like(x).index_add(0, target, sent)
        return x + self.out(F.relu(self.update(torch.cat((x, received), -1))))


class GraphTransformer(nn.Module):
    """Attention among all nodes, biased by features of the edge between two; positions from eigenvectors."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter, self.positions = nn.Linear(FEATURES, width), nn.Linear(3, width, bias=False)
        self.blocks = nn.ModuleList(BiasedBlock(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, eigenvectors: Tensor, features: Tensor) -> Tensor:
        """Logits of every node."""
        x = self.enter(x) + self.positions(eigenvectors)
        for block in self.blocks:
            x = block(x, features)
        return self.head(self.norm(x))


class BiasedBlock(nn.Module):
    """A block whose attention sees the edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.edges = nn.Linear(EDGE_FEATURES, width // HEAD, bias=False)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        """Two residual branches."""
        x = x + self.attention(self.norm1(x), mask=self.edges(features).permute(0, 3, 1, 2))
        return x + self.mlp(self.norm2(x))


class SetTransformer(nn.Module):
    """Sets attend to inducing points and back (ISAB), a seed attends to all of them (PMA)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(InducedBlock(width) for _ in range(depth))
        self.seed = nn.Parameter(torch.randn(1, 1, width))
        self.pool = AttentionBlock(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every set."""
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(self.seed.expand(len(x), -1, -1), x)[:, 0])


class AttentionBlock(nn.Module):
    """`H = N(x + attention(x, y))`, `N(H + mlp(H))`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width), nn.LayerNorm(width)
        self.mlp, self.norm2 = Mlp(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Two residual branches."""
        x = self.norm1(x + self.attention(x, y))
        return self.norm2(x + self.mlp(x))


class InducedBlock(nn.Module):
    """Points attend to the set, the set attends to the points."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, 4, width))
        self.gather, self.spread = AttentionBlock(width), AttentionBlock(width)

    def forward(self, x: Tensor) -> Tensor:
        """The set, changed."""
        return self.spread(x, self.gather(self.points.expand(len(x), -1, -1), x))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _graph() -> tuple[Tensor, Tensor, Tensor]:
    """Features, an adjacency with every node its own neighbour, classes."""
    generator = _generator()
    x = torch.randn(NODES, FEATURES, generator=generator)
    edges = torch.rand(NODES, NODES, generator=generator) < 0.15
    adjacency = (edges | edges.T | torch.eye(NODES, dtype=torch.bool)).float()
    return x, adjacency, torch.randint(CLASSES, (NODES,), generator=generator)


X, ADJACENCY, LABELS = _graph()
MASK = torch.arange(NODES) % 2 == 0
MEAN = ADJACENCY / ADJACENCY.sum(1, keepdim=True)
EDGES = ADJACENCY.nonzero().T.contiguous()
EDGE = torch.randn(EDGES.shape[1], EDGE_FEATURES, generator=_generator())
PAIRS = torch.randn(1, NODES, NODES, EDGE_FEATURES, generator=_generator())
SETS = torch.randn(16, 8, FEATURES, generator=_generator())
PLAIN = {"*bias": "bias", "enter.weight": "input", "head.weight": "output", "*": "hidden"}


def _per_node(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets)


EXHIBITS = [
    Exhibit(
        name="GCN",
        build=GCN,
        batch=lambda seed: ((X, MEAN, MASK), LABELS[MASK]),
        loss=F.cross_entropy,
        roles=PLAIN,
        branches=0,
        depths=(),
        lr=SMALL_LR,
        shows="the result is x[mask]; a product with an adjacency is no layer",
    ),
    Exhibit(
        name="GAT",
        build=GAT,
        batch=lambda seed: ((X, ADJACENCY, MASK), LABELS[MASK]),
        loss=F.cross_entropy,
        roles={
            "*bias": "bias",
            "*source": "output",
            "*target": "output",
            "layers.0.weight.weight": "input",
            "head.weight": "output",
            "*": "hidden",
        },
        branches=0,
        depths=(),
        lr=SMALL_LR,
        shows="attention vectors: `(h*a).sum(-1)` is a contraction",
    ),
    Exhibit(
        name="GIN",
        build=GIN,
        batch=lambda seed: ((X, MEAN), LABELS[:1]),
        loss=F.cross_entropy,
        roles={
            "*norm.weight": "gain",
            "*eps": "gain",
            "*bias": "bias",
            "layers.0.first.weight": "input",
            "head.weight": "output",
            "*": "hidden",
        },
        branches=0,
        depths=(),
        lr=SMALL_LR,
        cheap=True,
        shows="`(1 + ε)x + Ax` is no residual branch: there is no weight in it",
    ),
    Exhibit(
        name="message passing",
        build=MessagePassing,
        batch=lambda seed: ((X, EDGES, EDGE), LABELS),
        loss=F.cross_entropy,
        roles=PLAIN,
        branches=2,
        widths=(64, 128, 256),
        lr=SMALL_LR,
        shows="gathered with an index, added up with index_add, inside of a branch",
    ),
    Exhibit(
        name="graph transformer",
        build=GraphTransformer,
        batch=lambda seed: ((X[None], X[None, :, :3], PAIRS), LABELS),
        loss=_per_node,
        roles={
            "*norm*weight": "gain",
            "*bias": "bias",
            "enter.weight": "input",
            "positions.weight": "input",
            "*edges.weight": "input",
            "head.weight": "output",
            "*": "hidden",
        },
        branches=4,
        lr=SMALL_LR,
        shows="scores get a bias that a layer makes from data, one for each head",
    ),
    Exhibit(
        name="Set Transformer",
        build=SetTransformer,
        batch=lambda seed: (SETS, LABELS[:16]),
        loss=F.cross_entropy,
        roles={
            "*norm*weight": "gain",
            "*bias": "bias",
            "seed": "input",
            "*points": "input",
            "enter.weight": "input",
            "head.weight": "output",
            "*": "hidden",
        },
        branches=6,
        widths=(64, 256, 512),
        lr=4 * SMALL_LR,
        shows="branches around a small stream of inducing points; a stream that begins as a parameter",
    ),
]
