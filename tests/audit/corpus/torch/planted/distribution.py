"""A distribution checks its arguments on the host, in the library."""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net = torch.nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(8, 16, device=device)
for step in range(6):
    policy = torch.distributions.Categorical(logits=net(x))  # planted: control-flow
    action = policy.sample()
    loss = -policy.log_prob(action).mean()  # planted: control-flow
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
