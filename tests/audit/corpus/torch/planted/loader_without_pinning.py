"""A DataLoader whose batches are in ordinary memory."""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net = torch.nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(8, 16, device=device)
y = torch.randint(4, (8,), device=device)
data = torch.utils.data.TensorDataset(torch.randn(48, 16), torch.randint(4, (48,)))
loader = torch.utils.data.DataLoader(data, 8)
for host_x, host_y in loader:
    x = host_x.to(device)  # planted: pageable-copy
    y = host_y.to(device)  # planted: pageable-copy
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
