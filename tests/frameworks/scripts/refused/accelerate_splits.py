import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import psjob.integrations.accelerate  # noqa: F401

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
accelerator.prepare(DataLoader(torch.randn(16, 4), batch_size=3))
