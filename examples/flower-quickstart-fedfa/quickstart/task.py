"""Model, data, training and test."""

import torch
import torch.nn.functional as F
from fedfa import add_ffa
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small CNN for 8 px digits."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.conv2 = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(32 * 2 * 2, 10)
        add_ffa(self, after=["conv1", "conv2"])

    def forward(self, x):
        return self.fc(self.conv2(self.conv1(x)).flatten(1))


def load_data(partition_id: int, num_partitions: int):
    """One site's share of scikit-learn's digits, as its device records them: each site has a contrast of its own."""
    digits, labels = load_digits(return_X_y=True)
    own = slice(partition_id, None, num_partitions)
    contrast = 1 - 2 * partition_id / max(num_partitions - 1, 1)
    x = torch.tensor(digits[own], dtype=torch.float32).view(-1, 1, 8, 8) / 16 * contrast
    y = torch.tensor(labels[own])
    cut = len(x) * 4 // 5
    train, test = TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64)


def train(net, trainloader, epochs, lr, device):
    """Train the model on the training set."""
    net.to(device)
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    running_loss = 0.0
    for _ in range(epochs):
        for x, y in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    """Validate the model on the test set."""
    net.to(device)
    net.eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for x, y in testloader:
            outputs = net(x.to(device))
            loss += F.cross_entropy(outputs, y.to(device), reduction="sum").item()
            correct += (outputs.argmax(1) == y.to(device)).sum().item()
    total = len(testloader.dataset)
    return loss / total, correct / total
