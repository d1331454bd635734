"""What a user writes, in its types: read by mypy and by pyright in test_typed_face.py, never run.

`assert_type` fails where a checker sees Any or another type. Of a batch torch itself tells Any.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, assert_type

import torch
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps
from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, LogLine, Series, SpanView

Phase = Literal["Pending", "Running", "Recovering", "Suspended", "Complete", "Failed"]


def train(model: torch.nn.Linear, loader: DataLoader[tuple[torch.Tensor, ...]]) -> None:
    model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_type(model, torch.nn.Linear)
    assert_type(optimizer, torch.optim.SGD)
    state = ps.state(best=0.0)
    for epoch in ps.epochs(3):
        assert_type(epoch, int)
        for x, y in ps.shard(loader):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            ps.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ps.report(loss=loss)
    ps.wait()
    ps.checkpoint()
    if ps.is_first():
        ps.export("weights.safetensors", model)
    assert_type((ps.rank(), ps.world(), ps.step(), ps.epoch()), tuple[int, int, int, int])
    assert_type(ps.__version__, str)
    del state


def parts(model: torch.nn.Sequential) -> None:
    pipe = ps.pipeline(model, torch.nn.functional.mse_loss, cuts=[2], microbatches=2)
    assert_type(pipe.step(torch.ones(8, 2), torch.zeros(8, 1)), torch.Tensor)
    rows: torch.nn.Module = ps.Embedding(10, 4)
    bags: torch.nn.Module = ps.EmbeddingBag(10, 4)
    table: torch.nn.Module = ps.Table(4, 10)
    ps.offload_embeddings(torch.nn.Sequential(rows, bags, table), min_rows=10)
    try:
        ps.mirror(model, torch.optim.SGD(model.parameters(), lr=0.1), "ring")
        ps.all_reduce(torch.ones(3), deadline=60)
    except ps.PeerLost as lost:
        assert_type(lost, ps.PeerLost)
    except ps.Refused as refused:
        assert_type(str(refused), str)


def start() -> None:
    with ps.Client.local() as client:
        assert_type(client, ps.Client)
        job = client.train("train.py", workers=2, shards=1, mode="async")
        assert_type(job, ps.Job)
        assert_type(job.id, str)
        assert_type(job.phase, Phase)
        assert_type(job.wait(timeout=60), JobView)
        assert_type(job.wait().progress.loss, float | None)
        assert_type(job.load_weights(), dict[str, torch.Tensor])
        assert_type(job.metrics(), HistoryView)
        assert_type(job.metrics().of("loss"), Series | None)
        assert_type(job.logs("worker-0", tail=3), Iterator[LogLine])
        assert_type(job.checkpoint(), CheckpointView)
        assert_type(job.resume(), ps.Job)
        assert_type(client.list(), Sequence[JobView])
        assert_type(client.events(job.id), Sequence[EventView])
        assert_type(client.timeline(job.id), Sequence[SpanView])
        assert_type(client.watch(job.id), Iterator[JobView])
        try:
            assert_type(client.job("digits").get(), JobView)
        except ps.NoSuchJob as problem:
            assert_type(problem.in_terminal, str)
        except (ps.JobFailed, ps.DeadlinePassed, ps.Conflict, ps.BadManifest, ps.CannotShip, ps.NoWeights):
            raise
        except (ps.Unreachable, ps.NotAllowed, ps.NotServed) as problem:
            assert_type(str(problem), str)


async def started() -> None:
    async with ps.AsyncClient.kube(namespace="team-a") as client:
        assert_type(client, ps.AsyncClient)
        job = await client.submit("job.yaml")
        assert_type(job, ps.AsyncJob)
        assert_type(await job.phase(), Phase)
        assert_type(await job.wait(), JobView)
        assert_type(await job.load_weights(), dict[str, torch.Tensor])
        async for line in job.logs(follow=True):
            assert_type(line, LogLine)


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=2)
