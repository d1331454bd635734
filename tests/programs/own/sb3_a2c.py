"""A2C of Stable-Baselines3 on CartPole, with its RMSprop; each worker plays games of its own."""

import torch
from stable_baselines3 import A2C

import psjob as ps  # new

model = A2C("MlpPolicy", "CartPole-v1", n_steps=8, seed=7, device="cpu", verbose=0)
model.policy, model.policy.optimizer = ps.attach(model.policy, model.policy.optimizer)  # new
model.set_random_seed(7 + ps.rank())  # new
model.learn(total_timesteps=96)
with torch.no_grad():
    print("final loss", model.policy.predict_values(torch.ones(1, 4)).item())
