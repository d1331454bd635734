"""Sentences that mean the same come close: a SentenceTransformer of a small BERT, with one of the library's losses, in a plain loop."""

import torch
from sentence_transformers import SentenceTransformer, losses, models
from torch.utils.data import DataLoader

import psjob as ps  # new

torch.manual_seed(0)
words = models.Transformer("tiny-bert", max_seq_length=16)
model = SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())], device="cpu")
nouns, verbs = ["cat", "dog", "tree", "house"], ["sees", "hears"]
pairs = [(f"the {a} {v} a {b}", f"a {b} the {a} {v}") for a in nouns for b in nouns for v in verbs]
loader = DataLoader(pairs, batch_size=4, shuffle=True, collate_fn=lambda batch: [list(side) for side in zip(*batch, strict=True)])
loss_func = losses.MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = ps.attach(model, optimizer)  # new
loader = ps.shard(loader)  # new
for epoch in range(3):
    for sides in loader:
        features = [model.tokenize(side) for side in sides]
        loss = loss_func(features, torch.empty(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
