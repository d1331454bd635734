"""What users get wrong in a script of a job, each a function that is called by its name: `python mistakes.py a_lazy_module`.

The sentence of each names its remedy. `SAYS` has words of it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

DATA = TensorDataset(torch.arange(64.0).view(16, 4))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def attached() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = sgd(model)
    ps.attach(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any = None) -> None:
    model(torch.ones(2, 4) if x is None else x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def no_optimizer() -> None:
    ps.attach(net())


def a_class_of_optimizer() -> None:
    ps.attach(net(), torch.optim.SGD)  # type: ignore[call-overload]


def a_list_of_parameters() -> None:
    model = net()
    ps.attach(list(model.parameters()), sgd(model))  # type: ignore[type-var]


def optimizer_of_another_model() -> None:
    ps.attach(net(), sgd(net()))


def a_layer_left_out() -> None:
    model = net()
    ps.attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1))  # type: ignore[operator]


def attached_twice() -> None:
    attached()
    attached()


def a_name_with_a_dash() -> None:
    model = net()
    ps.attach(model, sgd(model), name="my-model")


def one_name_twice() -> None:
    for model in (net(), net()):
        ps.attach(model, sgd(model), name="one")


def a_second_model_too_late() -> None:
    model = net()
    model, optimizer = ps.attach(model, sgd(model), name="first")
    step(model, optimizer)
    other = net()
    ps.attach(other, sgd(other), name="second")


def a_lazy_module() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    ps.attach(model, sgd(model))


def a_model_on_meta() -> None:
    model = nn.Linear(4, 1, device="meta")
    ps.attach(model, sgd(model))


def complex_parameters() -> None:
    model = nn.Linear(4, 1, dtype=torch.complex64)
    ps.attach(model, sgd(model))


def an_optimizer_that_has_stepped() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    ps.attach(model, optimizer)


def lbfgs() -> None:
    model = net()
    ps.attach(model, torch.optim.LBFGS(model.parameters()))


def sparse_adam() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    ps.attach(model, torch.optim.SparseAdam(model.parameters()))


def max_norm() -> None:
    model = nn.Embedding(4, 2, max_norm=1.0)
    ps.attach(model, sgd(model))


def a_number_to_put_back() -> None:
    model = net()
    ps.attach(model, sgd(model), best=3)


def a_thing_that_cannot_be_put_back() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"thing": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model = net()
    ps.attach(model, sgd(model), odd=Odd())


def overlap_of_a_scripted_model() -> None:
    model: nn.Module = torch.jit.script(net())
    ps.attach(model, sgd(model), overlap=True)


def a_sparse_buffer() -> None:
    model = net()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    ps.attach(model, sgd(model))


def a_parameter_of_no_module() -> None:
    model, scale = net(), nn.Parameter(torch.ones(1))
    ps.attach(model, torch.optim.SGD([*model.parameters(), scale], lr=0.1))


def a_group_taken_out() -> None:
    model = net()
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    ps.attach(model, optimizer)
    step(model, optimizer)
    del optimizer.param_groups[1:]
    step(model, optimizer)


def a_loader_of_another_library() -> None:
    class Doubled:
        def __init__(self, loader: DataLoader[Any]) -> None:
            self.loader = loader

        def __iter__(self) -> Any:
            return ([2 * x] for (x,) in self.loader)

    attached()
    ps.shard(Doubled(DataLoader(DATA)))


def a_loader_that_is_sharded_already() -> None:
    attached()
    ps.shard(ps.shard(DataLoader(DATA)))


def catches_what_is_refused() -> None:
    model, optimizer = attached()
    for _ in range(5):
        try:
            with torch.no_grad():
                model[0].weight.mul_(0.5)  # type: ignore[operator,index]
            step(model, optimizer)
        except BaseException:
            print("goes on")


def a_list_for_a_loader() -> None:
    attached()
    ps.shard([1, 2, 3])


def a_data_set_for_a_loader() -> None:
    attached()
    ps.shard(DATA)  # type: ignore[arg-type]


def an_order_that_is_never_the_same() -> None:
    class Moody(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Any:
            import secrets

            return iter(sorted(range(16), key=lambda _: secrets.randbits(30)))

        def __len__(self) -> int:
            return 16

    model, optimizer = attached()
    for (x,) in ps.shard(DataLoader(DATA, sampler=Moody())):
        step(model, optimizer, x)


def negative_epochs() -> None:
    attached()
    for _ in ps.epochs(-3):
        pass


def epochs_before_attach() -> None:
    for _ in ps.epochs(2):
        attached()


def state_given_twice() -> None:
    attached()
    ps.state(best=1.0)
    ps.state(best=2.0)


def state_that_cannot_be_kept() -> None:
    attached()
    ps.state(lock=threading.Lock())


def a_text_for_a_number() -> None:
    attached()
    ps.report(loss="small")  # type: ignore[arg-type]


def a_whole_batch_of_losses() -> None:
    attached()
    ps.report(loss=torch.ones(3))


def clips_a_part() -> None:
    model, _ = attached()
    model(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(model[0].parameters(), 1.0)  # type: ignore[operator]


def clips_by_the_largest() -> None:
    model, _ = attached()
    model(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))


def clips_at_zero() -> None:
    model, _ = attached()
    model(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.0)


def clips_twice() -> None:
    model, _ = attached()
    model(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def loads_an_optimizer() -> None:
    _, optimizer = attached()
    optimizer.load_state_dict(sgd(net()).state_dict() | {"state": {0: {"momentum_buffer": torch.ones(3, 4)}}})


def reads_the_state() -> None:
    model, optimizer = attached()
    step(model, optimizer)
    print(optimizer.state[next(model.parameters())])


def resets_the_state() -> None:
    _, optimizer = attached()
    optimizer.state.clear()


def adds_a_group() -> None:
    _, optimizer = attached()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def weights_by_hand() -> None:
    model, optimizer = attached()
    step(model, optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    step(model, optimizer)


def steps_by_hand() -> None:
    model, _ = attached()
    for (x,) in ps.shard(DataLoader(DATA, batch_size=4)):
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]


def a_learning_rate_of_nan() -> None:
    model, optimizer = attached()
    optimizer.param_groups[0]["lr"] = float("nan")
    step(model, optimizer)


def an_iterator_for_a_loader() -> None:
    attached()
    ps.shard(iter(DataLoader(DATA)))


SAYS: dict[str, str] = {
    "no_optimizer": "which needs one",
    "a_class_of_optimizer": "attach takes a torch Module and a torch Optimizer",
    "a_list_of_parameters": "attach takes a torch Module",
    "optimizer_of_another_model": "Add it, or freeze it",
    "a_layer_left_out": "Add it, or freeze it",
    "attached_twice": "give each model a name",
    "a_name_with_a_dash": "must be a word of letters",
    "one_name_twice": "each model has a name of its own",
    "a_second_model_too_late": "attach all models, each with its name, before the first",
    "a_lazy_module": "Run a batch through the model before attach",
    "a_model_on_meta": "Give the model memory before attach",
    "complex_parameters": "torch.view_as_real",
    "an_optimizer_that_has_stepped": "Attach it new",
    "lbfgs": "Take torch.optim.Adam",
    "sparse_adam": "Take ps.Embedding",
    "max_norm": "Leave max_norm out",
    "a_number_to_put_back": "has no state_dict and load_state_dict",
    "a_thing_that_cannot_be_put_back": "could not be put back after a restart",
    "overlap_of_a_scripted_model": "leave overlap out",
    "a_sparse_buffer": "Keep what never changes as a plain attribute",
    "a_parameter_of_no_module": "as by model.scale = scale",
    "a_group_taken_out": "let a group rest by requires_grad_(False)",
    "a_loader_of_another_library": "as in Doubled(ps.shard(loader))",
    "a_loader_that_is_sharded_already": "a loader is given to it once",
    "catches_what_is_refused": "Change them before attach",
    "a_list_for_a_loader": "wrap a list as DataLoader",
    "a_data_set_for_a_loader": "give it DataLoader(dataset, batch_size=…)",
    "an_order_that_is_never_the_same": "gives another order each time it is asked",
    "negative_epochs": "takes a number of epochs",
    "epochs_before_attach": "attach",
    "state_given_twice": "twice",
    "state_that_cannot_be_kept": "lock",
    "a_text_for_a_number": "a number or a tensor of one element",
    "a_whole_batch_of_losses": "a number or a tensor of one element",
    "clips_a_part": "give it model.parameters()",
    "clips_by_the_largest": "Take 2, or clip by value",
    "clips_at_zero": "must be above 0",
    "clips_twice": "Clip in one way",
    "loads_an_optimizer": "begin from a checkpoint with checkpoint.resumeFrom",
    "reads_the_state": "optimizer.state_dict()['state'] has a copy",
    "resets_the_state": "Set training.updateAt: worker",
    "adds_a_group": "attach(…, later=[",
    "weights_by_hand": "Change them before attach",
    "steps_by_hand": "Train with optimizer.step()",
    "a_learning_rate_of_nan": "must be a finite number",
    "an_iterator_for_a_loader": "loop over it without shard",
}


if __name__ == "__main__":
    globals()[sys.argv[1]]()
