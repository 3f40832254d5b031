"""A torchmetrics accuracy of every batch, shown in every step; cured: updated in every step, computed at the end."""

import torch
import torchmetrics
from common import Clock, cured, device, loader, net

model = net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10, validate_args=not cured).to(device)
clock = Clock()
shown = []
for x, y in loader(pin_memory=device.type == "cuda"):
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    optimizer.zero_grad()
    outputs = model(x)
    loss = torch.nn.functional.cross_entropy(outputs, y)
    loss.backward()
    optimizer.step()
    if cured:
        accuracy.update(outputs, y)
    else:
        shown.append(f"{accuracy(outputs, y).item():.3f}")
    clock()
accuracy.compute()
clock.report(model)
