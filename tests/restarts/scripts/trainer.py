"""Trainer with evaluation and a checkpoint of its own every three steps, early stopping, and its best model loaded at the end."""

import os

import torch
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import psjob as ps
from psjob.integrations.transformers import PSCallback


class Told(TrainerCallback):
    """Prints each evaluation."""

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        """A line."""
        if state.is_world_process_zero:
            print(f"line step {state.global_step}: {metrics['eval_loss']:.6f}")


torch.manual_seed(19)
rows = torch.randint(0, 24, (56, 6))
data = [{"input_ids": row, "labels": row} for row in rows]
model = GPT2LMHeadModel(GPT2Config(vocab_size=24, n_positions=8, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    "out", num_train_epochs=5, per_device_train_batch_size=5, learning_rate=3e-2, lr_scheduler_type="linear", max_grad_norm=0.5,
    eval_strategy="steps", eval_steps=3, save_steps=3, save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
    logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=19,
)  # fmt: skip
stopping = EarlyStoppingCallback(early_stopping_patience=5)
trainer = Trainer(model, arguments, train_dataset=data[:40], eval_dataset=data[40:], callbacks=[PSCallback(), stopping, Told()])
last = get_last_checkpoint("out") if os.path.isdir("out") else None  # as the examples of transformers do
trainer.train(resume_from_checkpoint=last)
if ps.is_first():
    steps, made = trainer.state.global_step, sum("eval_loss" in entry for entry in trainer.state.log_history)
    print(f"line tails {made} of {-(-steps // 3)}; best {trainer.state.best_metric:.6f}, {steps} steps")  # the last step is evaluated too
