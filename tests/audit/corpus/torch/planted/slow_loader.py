"""Samples that take long to make."""

import time

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = torch.nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, number):
        time.sleep(0.05)
        return torch.randn(16), number % 4


loader = torch.utils.data.DataLoader(Samples(), 1, pin_memory=True)
for x, y in loader:  # planted: data-loader
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
