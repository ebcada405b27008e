"""A graph convolution network of torch-geometric over a table of nodes, which its forward reads as a whole."""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.nn import GCN
from torch_geometric.utils import stochastic_blockmodel_graph

import thermocline as tc

from .case import Convert, Trained, ZooCase

CLASSES, OF_EACH, DIM, LR = 8, 150, 32, 0.05


class NodeClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Embedding(CLASSES * OF_EACH, DIM)
        self.layers = GCN(DIM, 32, num_layers=2, out_channels=CLASSES, dropout=0.3)

    def forward(self, edges: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.nodes.weight, edges)
        return out


def train(seed: int, convert: Convert) -> Trained:
    torch.manual_seed(seed)
    inside, outside = 0.03, 0.002  # probabilities of an edge
    edges = stochastic_blockmodel_graph([OF_EACH] * CLASSES, torch.eye(CLASSES) * (inside - outside) + outside)
    classes = torch.arange(CLASSES).repeat_interleave(OF_EACH)
    known = torch.rand(len(classes)) < 0.3
    model = NodeClassifier()
    convert(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(edges)[known], classes[known])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        found = model(edges).argmax(1)
    return Trained((found == classes)[~known].float().mean().item(), losses)


CASES = [ZooCase("GCN with a node table", "torch-geometric", "accuracy", tc.Adagrad(lr=LR), train)]
