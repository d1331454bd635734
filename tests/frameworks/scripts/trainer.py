"""A small language model, as the Trainer's own pages train one; three lines are psjob's."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from psjob.integrations.transformers import PSCallback

options = dict(word.split("=") for word in sys.argv[1:])
torch.manual_seed(3)
rows = torch.randint(0, 32, (int(options.get("count", 40)), 6))
data = [{"input_ids": row, "labels": row} for row in rows]
drop = float(options.get("dropout", 0))
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop)
)
arguments = TrainingArguments(
    "out", num_train_epochs=2, per_device_train_batch_size=2, gradient_accumulation_steps=int(options.get("accumulate", 1)),
    optim=options.get("optim", "adamw_torch"), learning_rate=float(options.get("lr", 1e-2)),
    lr_scheduler_type="cosine", warmup_steps=3, max_grad_norm=float(options.get("clip", 0.5)),
    train_sampling_strategy=options.get("order", "sequential"), bf16=options.get("bf16") == "yes",
    logging_steps=2, save_strategy=options.get("save", "no"), eval_strategy=options.get("save", "no"),
    report_to=[options["logger"]] if "logger" in options else [], disable_tqdm=True, use_cpu=True, ddp_find_unused_parameters=False,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[PSCallback()])
trainer.train()
model.eval()
with torch.no_grad():
    print("final loss", model(input_ids=rows, labels=rows).loss.item())
print("steps", trainer.state.global_step, "epoch", trainer.state.epoch, "main", trainer.is_world_process_zero())
