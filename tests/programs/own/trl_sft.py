"""Supervised fine-tuning by the SFTTrainer of TRL, on sentences of a file."""

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from psjob.integrations.transformers import PSCallback  # new

set_seed(0)
train = load_dataset("json", data_files="text/train.jsonl", split="train", cache_dir="cache")
model = AutoModelForCausalLM.from_pretrained("tiny")
arguments = SFTConfig(
    "out", num_train_epochs=1, per_device_train_batch_size=4, learning_rate=0.05, optim="sgd", train_sampling_strategy="sequential",
    report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False,
)  # fmt: skip
callbacks = []
callbacks.append(PSCallback())  # new
trainer = SFTTrainer(model, arguments, train_dataset=train, processing_class=AutoTokenizer.from_pretrained("tiny"), callbacks=callbacks)
trainer.train()
if trainer.is_world_process_zero():
    rows = torch.arange(1, 17).view(2, 8)
    model.eval()
    with torch.no_grad():
        print("final loss", model(input_ids=rows, labels=rows).loss.item())
