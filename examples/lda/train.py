"""Topics of documents by collapsed Gibbs sampling (Griffiths, Steyvers 2004): all workers' counts are two tables on the shards."""

import argparse
import random
from itertools import accumulate

import torch
from torch.utils.data import DataLoader

import psjob as ps

TOPICS, WORDS, DOCUMENTS, LENGTH = 4, 120, 200, 50
ALPHA, BETA = 0.5, 0.1


class Counts(torch.nn.Module):
    """How often each word has each topic, and how often all words together have it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ps.Table(WORDS, TOPICS, combine="sum", dtype=torch.int32)
        self.topics = ps.Table(1, TOPICS, combine="sum", dtype=torch.int32)


class Assigned:
    """The topic of each word of each document, -1 before the first pass. A restart puts it back: the counts hold it already."""

    def __init__(self) -> None:
        self.topic = torch.full((DOCUMENTS, LENGTH), -1, dtype=torch.int8)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"topic": self.topic}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.topic.copy_(state["topic"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    documents, unseen = corpus()
    loader = DataLoader(torch.arange(DOCUMENTS), batch_size=10)  # never shuffled: a worker has the same documents in every pass
    assigned = Assigned()
    counts, loop = ps.attach(Counts(), assigned=assigned)
    random.seed(f"{args.seed} {ps.rank()}")
    for _ in ps.epochs(args.passes):
        for batch in ps.shard(loader):
            sample(counts, documents[batch], assigned.topic, batch)
            loop.step()
            ps.report(total=args.passes * len(loader) // ps.world())

    if ps.is_first():
        found = likelihood(counts.words.pull(torch.arange(WORDS)), unseen)
        ps.report(likelihood=found)
        print(f"held-out log-likelihood a word {found:.4f}", flush=True)


def sample(counts: Counts, words: torch.Tensor, topic: torch.Tensor, batch: torch.Tensor) -> None:
    """Draw the topic of each word of a batch anew, given all others' counts, and push what that changes in them."""
    distinct = words.unique()
    # None is below 0, unless a shard was lost in async, and with it the push of what a later one takes away.
    of_word = dict(zip(distinct.tolist(), counts.words.pull(distinct).clamp(min=0).tolist(), strict=True))
    of_all = counts.topics.pull(torch.zeros(1, dtype=torch.int64))[0].clamp(min=0).tolist()
    before, after = topic[batch].tolist(), []
    for document, topics in zip(words.tolist(), before, strict=True):
        here = [topics.count(t) for t in range(TOPICS)]
        after.append([])
        for word, old in zip(document, topics, strict=True):
            row, new = of_word[word], random.randrange(TOPICS)  # in the first pass any; what the others have then misleads
            if old >= 0:
                row[old], of_all[old], here[old] = max(row[old] - 1, 0), max(of_all[old] - 1, 0), here[old] - 1
                chances = [(here[t] + ALPHA) * (row[t] + BETA) / (of_all[t] + WORDS * BETA) for t in range(TOPICS)]
                (new,) = random.choices(range(TOPICS), cum_weights=list(accumulate(chances)))
            row[new] += 1
            of_all[new] += 1
            here[new] += 1
            after[-1].append(new)
    topic[batch] = torch.tensor(after, dtype=torch.int8)
    changes = one_hot(torch.tensor(after)) - one_hot(torch.tensor(before))
    counts.words.push(words, changes)
    counts.topics.push(torch.zeros(1, dtype=torch.int64), changes.sum((0, 1), dtype=torch.int32)[None])


def one_hot(topic: torch.Tensor) -> torch.Tensor:
    """1 where a word's topic is, zeros alone where it has none."""
    return (topic[..., None] == torch.arange(TOPICS)).int()


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Words of the documents to learn from and of 50 others, drawn from topics of a seed."""
    torch.manual_seed(7)
    topics = torch.distributions.Dirichlet(torch.full((WORDS,), 0.1)).sample((TOPICS,))
    mixtures = torch.distributions.Dirichlet(torch.full((TOPICS,), 0.2)).sample((DOCUMENTS + 50,))
    words = torch.distributions.Categorical(mixtures @ topics).sample((LENGTH,)).T
    return words[:DOCUMENTS], words[DOCUMENTS:]


def likelihood(counts: torch.Tensor, unseen: torch.Tensor) -> float:
    """Mean log-likelihood of the second half of each unseen document, its mixture of topics fitted to the first half (by EM)."""
    words = counts.clamp(min=0) + BETA
    words /= words.sum(0)
    seen, asked = words[unseen[:, : LENGTH // 2]], words[unseen[:, LENGTH // 2 :]]
    mixture = torch.full((len(unseen), TOPICS), 1 / TOPICS)
    for _ in range(50):
        share = seen * mixture[:, None]
        mixture = (share / share.sum(2, keepdim=True)).sum(1) + ALPHA
        mixture /= mixture.sum(1, keepdim=True)
    return float((asked * mixture[:, None]).sum(2).log().mean())


if __name__ == "__main__":
    main()
