"""Losses stored in a tensor of the host, and one read from it by an index of the device."""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net = torch.nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(8, 16, device=device)
y = torch.randint(4, (8,), device=device)
losses = torch.zeros(6)
for step in range(6):
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses[step] = loss.detach()  # planted: copy-to-host
    last = losses[y[0]]  # planted: read
