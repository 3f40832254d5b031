"""Tensors whose size, bound or content is a value of the device."""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net = torch.nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(8, 16, device=device)
y = torch.randint(4, (8,), device=device)
for step in range(6):
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    places = torch.arange(4)
    pair = torch.empty(2, device=device).fill_(loss.detach())
    counts = torch.zeros(4, 2, device=device)
    parts = x.view(8, -1)
