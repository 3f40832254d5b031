"""float16 with a GradScaler, which reads a value in every step; cured: bfloat16, which needs no scaler."""

import torch
from common import Clock, cured, device, loader, net

model = net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device.type, enabled=not cured)
dtype = torch.bfloat16 if cured or device.type == "cpu" else torch.float16
clock = Clock()
for x, y in loader(pin_memory=device.type == "cuda"):
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=dtype):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    clock()
clock.report(model)
