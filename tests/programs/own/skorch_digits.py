"""sklearn's digits by a NeuralNetClassifier of skorch."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier

import psjob as ps  # new

torch.manual_seed(0)
X, y = load_digits(return_X_y=True)
X, y = (X[:160] / 16).astype(np.float32), y[:160]
module = torch.nn.Sequential(torch.nn.Linear(64, 24), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(24, 10))
net = NeuralNetClassifier(
    module, criterion=torch.nn.CrossEntropyLoss, optimizer=torch.optim.SGD, optimizer__momentum=0.9, lr=0.05, max_epochs=2, batch_size=8,
    iterator_train__shuffle=True, train_split=None,
)  # fmt: skip
net.initialize()
net.module_, net.optimizer_ = ps.attach(net.module_, net.optimizer_)  # new
get = net.get_iterator
net.get_iterator = lambda dataset, training=False: ps.shard(get(dataset, training=training)) if training else get(dataset)  # new
net.partial_fit(X, y)
print("final loss", net.get_loss(torch.as_tensor(net.forward(X)), torch.as_tensor(y)).item())
