"""An Accelerate loop that gathers predictions for metrics and reads the loss in every step; cured: once at the end."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from common import Clock, cured, loader, net

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=cured))
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, loader(pinned=cured))
clock = Clock()
right, seen, total = 0, 0, 0.0
for x, y in batches:
    optimizer.zero_grad()
    outputs = model(x)
    loss = torch.nn.functional.cross_entropy(outputs, y)
    accelerator.backward(loss)
    optimizer.step()
    guesses, answers = accelerator.gather_for_metrics((outputs.argmax(dim=-1), y))
    if cured:
        right = right + (guesses == answers).sum()
        total = total + loss.detach()
    else:
        right += (guesses == answers).sum().item()
        total += loss.item()
    seen += len(answers)
    clock()
print(float(right) / seen, float(total))
clock.report(model)
