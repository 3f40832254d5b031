"""float16 with a GradScaler, which reads a value in every step; cured: a fused optimizer, which looks on the device."""

import torch
from common import Clock, cured, device, loader, net

model = net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=cured)
scaler = torch.amp.GradScaler(device.type)
dtype = torch.bfloat16 if device.type == "cpu" else torch.float16
clock = Clock()
for x, y in loader(pinned=True):
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=dtype):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    clock()
clock.report(model)
