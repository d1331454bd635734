"""A BERT for sequences of two kinds, by the Trainer of transformers."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from psjob.integrations.transformers import PSCallback  # new

set_seed(0)
rows = torch.randint(1, 30, (64, 8))
labels = (rows[:, 0] > 15).long()
train = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
config = BertConfig(
    vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config)
arguments = TrainingArguments(
    "out", num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.05, optim="sgd", lr_scheduler_type="linear",
    train_sampling_strategy="sequential", report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
    average_tokens_across_devices=False,
)  # fmt: skip
callbacks = []
callbacks.append(PSCallback())  # new
trainer = Trainer(model, arguments, train_dataset=train, callbacks=callbacks)
trainer.train()
if trainer.is_world_process_zero():
    model.eval()
    with torch.no_grad():
        print("final loss", model(input_ids=rows, labels=labels).loss.item())
