"""Class weights made from a list in every step."""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net = torch.nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(8, 16, device=device)
y = torch.randint(4, (8,), device=device)
for step in range(6):
    weights = torch.tensor([1.0, 2.0, 1.0, 1.0], device=device)  # planted: python-data
    loss = torch.nn.functional.cross_entropy(net(x), y, weights)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
