"""A batch in ordinary memory."""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net = torch.nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(8, 16, device=device)
y = torch.randint(4, (8,), device=device)
batch = torch.randn(8, 16).pin_memory()
for step in range(6):
    x = batch.to(device, non_blocking=True)
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
