"""Processes that wait for each other in every step."""

import torch
import torch.distributed

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
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
    torch.distributed.barrier()  # planted: blocking-collective
torch.distributed.destroy_process_group()
