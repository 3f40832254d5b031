"""A torchmetrics accuracy of every batch, read in every step; cured: kept on the device, and not validated."""

import torch
import torchmetrics
from common import Clock, cured, device, loader, net

model = net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10, validate_args=not cured).to(device)
clock = Clock()
shown = []
for x, y in loader(pinned=True):
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    optimizer.zero_grad()
    outputs = model(x)
    loss = torch.nn.functional.cross_entropy(outputs, y)
    loss.backward()
    optimizer.step()
    value = accuracy(outputs, y)
    shown.append(value.detach() if cured else f"{value.item():.3f}")
    clock()
accuracy.compute()
clock.report(model)
