"""A Trainer that loads its best checkpoint in the end, which is an early one; two lines are psjob's."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from psjob.integrations.transformers import PSCallback

torch.manual_seed(3)
rows = torch.randint(0, 32, (40, 6))
data = [{"input_ids": row, "labels": row} for row in rows]
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    "out", num_train_epochs=2, per_device_train_batch_size=2, learning_rate=0.01, report_to=[], disable_tqdm=True, use_cpu=True,
    eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=5, load_best_model_at_end=True,
    metric_for_best_model="eval_loss", greater_is_better=True, save_total_limit=2,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[PSCallback()])
trainer.train()
print("best", trainer.state.best_model_checkpoint, trainer.state.best_metric, trainer.evaluate()["eval_loss"], flush=True)
