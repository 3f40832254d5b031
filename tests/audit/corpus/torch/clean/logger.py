"""A class of the program's own logs the loss; a thread does nothing of the kind."""

import threading

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net = torch.nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(8, 16, device=device)
y = torch.randint(4, (8,), device=device)


class Logger:
    def __init__(self):
        self.values = []

    def log(self, value):
        self.values.append(value.detach())


logger = Logger()
done = threading.Event()
thread = threading.Thread(target=done.wait)
thread.start()
for step in range(6):
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    logger.log(loss)
done.set()
thread.join()
