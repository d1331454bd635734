"""A small model of transformers by its name, or of timm, trained for some steps: any_model.py CLASS {"words of": "its config"}."""

import inspect
import json
import sys

import torch

import psjob as ps


def built(name: str, words: dict) -> torch.nn.Module:
    """The model, with the values of a seed."""
    torch.manual_seed(11)
    if name.startswith("timm."):
        import timm

        return timm.create_model(name.removeprefix("timm."), **words)
    import transformers

    return getattr(transformers, name)(getattr(transformers, name).config_class(**words))


def inputs_of(model: torch.nn.Module, rows: torch.Tensor) -> dict:
    """As many kinds of input as its forward asks for."""
    names = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "x")
    given = {"input_ids": rows, "pixel_values": (rows.float() / 7).view(-1, 1, 1, 8).expand(-1, 3, 32, 8).repeat(1, 1, 1, 4)}
    given["x"] = given["pixel_values"]
    extra = {"decoder_input_ids": rows} if "decoder_input_ids" in names else {}
    return {main: given[main]} | extra


if __name__ == "__main__":
    model = built(sys.argv[1], json.loads(sys.argv[2]))
    model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.randint(0, 20, (16, 8), generator=torch.Generator().manual_seed(5))
    for rows in ps.shard(torch.utils.data.DataLoader(data, batch_size=2)):
        given = inputs_of(model, rows)
        out = model(**given) if "x" not in given else model(given["x"])
        first = out if isinstance(out, torch.Tensor) else next(value for value in out.values() if isinstance(value, torch.Tensor))
        first.float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
