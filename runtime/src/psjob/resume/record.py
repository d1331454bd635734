"""The resume record: what a worker needs to continue at its last batch as if nothing had happened.

It holds the data cursor, the random generators, the model's buffers, the optimizer's numbers, and the state_dict of all that
was given to `attach`. As bytes it is JSON with tags and a safetensors part: nothing in it can run.

A buffer's form may change as the model trains; `put_buffers` puts one back all the same. `generator_states` asks all random generators that
a script may have drawn from for their states.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from psjob.checkpoint import files
from psjob.layout import memory, packing
from psjob.process.errors import Refused
from psjob.protocol.worker.local_group import split_records
from psjob.resume import tagged

MAGIC: Final = b"PSJR"
FORMAT: Final = 1
MAX_JSON: Final = 64 << 20
MAX_BYTES: Final = 256 << 20
_DAMAGED: Final = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RuntimeError)
"""Raised on JSON that `pack` did not write."""
_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


Form = list[Any]
"""Shape and dtype: `[[8, 4], "float32"]`."""
Forms = Mapping[str, Form | None]
WORDS = 624
"""Of the state of a Mersenne twister."""


@dataclass
class ResumeRecord:
    """`cursor`: where the data loop stands (None without `shard`); `step`: the clock it belongs to. Tensors are not copies."""

    cursor: dict[str, Any] | None
    step: int
    buffers: dict[str, torch.Tensor]
    stateful: dict[str, Any]
    groups: list[dict[str, Any]]
    rng: Mapping[str, Any] = field(default_factory=dict)
    wire: dict[str, Any] = field(default_factory=dict)
    """What the data path keeps from step to step: the residuals of encoded pushes, and the codecs taken."""
    beginning: torch.Tensor | None = None
    """Bytes of the packed record of the beginning of the epoch under way; None for a script without `ps.epochs`."""
    built: Forms = field(default_factory=dict)
    """Of buffers that are of another form than when the model was attached, the form of then; None: it was not there."""
    unsaved: list[str] = field(default_factory=list)
    """Buffers that the model's state_dict leaves out."""


def capture(
    cursor: Mapping[str, Any] | None, step: int, model: torch.nn.Module, stateful: Mapping[str, Any], optimizer: torch.optim.Optimizer,
    wire: Mapping[str, Any] | None = None, rng: Mapping[str, Any] | None = None, only: Collection[str] | None = None,
    beginning: torch.Tensor | None = None, built: BuiltBuffers | None = None,
) -> ResumeRecord:  # fmt: skip
    """The record of this moment; `rng` holds the generators' states, None: they are asked. It looks at the live tensors: `pack` it before
    training continues. `only`: names of the buffers that it holds; None: all. `built`: the buffers that the model was attached with."""
    held = {name: buffer.detach() for name, buffer in packing.named_buffers(model) if only is None or name in only}
    if built is not None:
        held |= {name: buffer for name, buffer in built.shared(held).items() if only is None or name in only}
    return ResumeRecord(
        cursor=None if cursor is None else dict(cursor),
        step=step,
        buffers=held,
        built={} if built is None else built.changed(held, only),
        unsaved=[] if built is None else built.unsaved(held),
        stateful={name: thing.state_dict() for name, thing in stateful.items()},
        groups=[{key: value for key, value in group.items() if _is_number(value)} for group in optimizer.param_groups],
        rng=generator_states() if rng is None else rng,
        wire=dict(wire or {}),
        beginning=beginning,
    )


def restore(
    record: ResumeRecord, model: torch.nn.Module, stateful: Mapping[str, Any], optimizer: torch.optim.Optimizer,
    only: Collection[str] | None = None, built: Forms | None = None,
) -> None:  # fmt: skip
    """Put everything back, of the buffers `only` these, the random generators last. `built` as for `restore_buffers`.

    Raises Refused, naming what the script no longer has or has newly.
    """
    restore_buffers(record, model, only, built)
    restore_objects(record, stateful)
    if len(record.groups) != len(optimizer.param_groups):
        raise Refused(f"the optimizer has {len(optimizer.param_groups)} parameter groups, the resume record {len(record.groups)}")
    for group, kept in zip(optimizer.param_groups, record.groups, strict=True):
        for key, value in kept.items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    put_generators(record.rng)


def restore_objects(record: ResumeRecord, stateful: Mapping[str, Any]) -> None:
    """Put back what attach was given. Raises Refused, naming what the script no longer has or has newly."""
    if odd := sorted(set(record.stateful) ^ set(stateful)):
        where = "now" if odd[0] in stateful else "when the record was taken"
        raise Refused(f"attach was given {odd[0]!r} only {where}; give attach the same objects as before")
    for name, thing in stateful.items():
        thing.load_state_dict(record.stateful[name])


def restore_buffers(record: ResumeRecord, model: torch.nn.Module, only: Collection[str] | None = None, built: Forms | None = None) -> None:
    """Give the model's buffers the values of the record; `only` these, or all.

    `built`: the forms that they had when the model was attached. None: those of now. What has grown, shrunk or come since then is put
    back as it was. Raises Refused, naming the first that was built in another form than in the record's process.
    """
    now = buffer_forms(model) if built is None else built
    then = {**{name: buffer_form(tensor) for name, tensor in record.buffers.items()}, **record.built}
    for name in sorted({*now, *then}):
        mine, theirs = now.get(name), then.get(name)
        if mine == theirs or not (only is None or name in only):
            continue
        if mine is None or theirs is None:
            where = "this model" if theirs is None else "the job"
            raise Refused(f"buffer {name!r} is only in {where}; every worker must build the same model")
        told, kept = (f"{tuple(shape)} torch.{dtype}" for shape, dtype in (mine, theirs))
        raise Refused(f"buffer {name!r} is {told}, the job's is {kept}; every worker must build the same model")
    names = sorted(name for name in {*record.buffers, *record.built} if only is None or name in only)
    put_buffers(model, {name: record.buffers.get(name) for name in names}, record.unsaved)


def verify_round_trip(stateful: Mapping[str, Any]) -> list[str]:
    """What of these objects' state_dict would not come back as it was, one sentence each; empty when all would."""
    problems: list[str] = []
    for name, thing in stateful.items():
        before = thing.state_dict()
        tensors: list[torch.Tensor] = []
        try:
            body = json.loads(json.dumps(tagged.encode_value(before, tensors, name), allow_nan=False))
            after = tagged.decode_value(body, _read_tensors(_write_tensors(tensors)))
        except (ValueError, TypeError) as error:
            problems.append(str(error)[:300])
            continue
        problems += tagged.differences(before, after, name)
    return problems


def pack(record: ResumeRecord) -> bytes:
    """One blob: magic, format, length of the JSON, JSON, safetensors. Raises Refused if a value cannot be kept."""
    return RecordPacker().pack(record)


class RecordPacker:
    """Packs one record after another. Generators that are the same object as in the one before are not encoded again."""

    def __init__(self) -> None:
        self._rng: Mapping[str, Any] | None = None
        self._json = ""
        self._tensors: list[torch.Tensor] = []
        self._raw = b""
        self._specs: list[tuple[str, str, tuple[int, ...]]] = []
        self._header, _ = files.make_header([])

    def pack(self, record: ResumeRecord) -> bytes:
        """As the function: the same bytes."""
        if record.rng is not self._rng:
            tensors: list[torch.Tensor] = []
            self._json = _dumps(record.rng, tensors, "rng")
            self._rng, self._tensors, self._raw = (
                record.rng,
                tensors,
                b"".join(memory.view(t) for t in memory.all_contiguous_values(tensors)),
            )
        tensors = list(self._tensors)
        rest = {
            "cursor": record.cursor, "step": record.step, "buffers": record.buffers, "stateful": record.stateful,
            "groups": record.groups, "wire": record.wire, "beginning": record.beginning, "built": record.built, "unsaved": record.unsaved,
        }  # fmt: skip
        body = f'{_dumps(rest, tensors)[:-1]},"rng":{self._json}}}'.encode()
        plain = memory.all_contiguous_values(tensors[len(self._tensors) :])
        data = (memory.view(tensor) for tensor in plain)
        header = self._header_of([*self._tensors, *plain])
        blob = b"".join([MAGIC, struct.pack("<IQ", FORMAT, len(body)), body, header, self._raw, *data])
        if len(blob) > MAX_BYTES:
            raise Refused(f"the resume record has {len(blob)} bytes, at most {MAX_BYTES}: keep less in buffers and in what attach is given")
        return blob

    def _header_of(self, tensors: Sequence[torch.Tensor]) -> bytes:
        specs = [(str(i), str(t.dtype).removeprefix("torch."), tuple(t.shape)) for i, t in enumerate(tensors)]
        if specs != self._specs:
            try:
                self._header, _ = files.make_header(specs)
            except ValueError as error:
                raise Refused(f"a resume record cannot hold this: {error}") from None
            self._specs = specs
        return self._header


def unpack(blob: bytes) -> ResumeRecord:
    """The record of a blob, of several processes that of the first; nothing in it can run code.

    Raises ValueError with a sentence on bytes that `pack` did not give.
    """
    return decode_record(*_parts(blob))


def buffers_of(blob: bytes) -> dict[str, torch.Tensor]:
    """Buffers that the model's state_dict has, by name. No other value of the record is made: what a script keeps may cost much.

    Raises ValueError as `unpack` does.
    """
    raw, tensors = _parts(blob, joined=True)
    try:
        whole = json.loads(raw)
        unsaved, told = frozenset(whole.get("unsaved", [])), whole["buffers"]
        kept = {name: tagged.decode_value(value, tensors) for name, value in told.items() if name not in unsaved}
    except _DAMAGED as error:
        raise ValueError(f"resume record is damaged: {type(error).__name__}: {str(error)[:200]}") from None
    if not all(isinstance(value, torch.Tensor) for value in kept.values()):
        raise ValueError("resume record is damaged: a buffer is no tensor")
    return kept


def _parts(blob: bytes, joined: bool = False) -> tuple[bytes, list[torch.Tensor]]:
    """Its JSON and its tensors. Raises ValueError."""
    blob = split_records(blob)[0]
    if len(blob) > MAX_BYTES or len(blob) < 16 or blob[:4] != MAGIC:
        raise ValueError(f"not a resume record: {len(blob)} bytes that begin with {blob[:4]!r}")
    form, length = struct.unpack_from("<IQ", blob, 4)
    if form != FORMAT:
        raise ValueError(f"resume record of format {form}, this psjob reads {FORMAT}")
    if length > min(MAX_JSON, len(blob) - 16):
        raise ValueError(f"resume record with {length} bytes of JSON in {len(blob)}")
    try:
        tensors = _read_tensors(blob[16 + length :], joined)
    except ValueError as error:
        raise ValueError(f"resume record is damaged: {str(error)[:200]}") from None
    return blob[16 : 16 + length], tensors


def beginning_of(record: ResumeRecord) -> ResumeRecord | None:
    """What a record holds of the beginning of its epoch. Raises ValueError as `unpack` does."""
    return None if record.beginning is None else unpack(bytes(memory.view(record.beginning)))


def decode_record(raw: bytes, tensors: Sequence[torch.Tensor]) -> ResumeRecord:
    """The record whose JSON is `raw`, with the tensors by the number that it calls them by. Raises ValueError on anything else."""
    try:
        whole = tagged.decode_value(json.loads(raw), tensors)
        made = ResumeRecord(
            whole["cursor"], whole["step"], whole["buffers"], whole["stateful"], whole["groups"], whole["rng"], whole.get("wire", {}),
            whole.get("beginning"), whole.get("built", {}), whole.get("unsaved", []),
        )  # fmt: skip
        check_generators(made.rng)
    except _DAMAGED as error:
        raise ValueError(f"resume record is damaged: {type(error).__name__}: {str(error)[:200]}") from None
    if type(made.step) is not int or not all(isinstance(part, dict) for part in (made.buffers, made.stateful, made.rng, made.wire)):
        raise ValueError("resume record is damaged: a part of it has another type")
    if not (made.cursor is None or isinstance(made.cursor, dict)) or not isinstance(made.groups, list):
        raise ValueError("resume record is damaged: cursor or groups have another type")
    if not are_forms(made.built) or not isinstance(made.unsaved, list):
        raise ValueError("resume record is damaged: what it says of buffers has another type")
    if not (made.beginning is None or (isinstance(made.beginning, torch.Tensor) and made.beginning.dtype is torch.uint8)):
        raise ValueError("resume record is damaged: the beginning of its epoch has another type")
    return made


def _is_number(value: object) -> bool:
    """A hyperparameter, as opposed to the parameters themselves, their names or a function."""
    if isinstance(value, tuple):
        return all(_is_number(item) for item in value)
    return value is None or type(value) in (bool, int, float, str) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _dumps(value: Any, tensors: list[torch.Tensor], path: str = "") -> str:
    """JSON with tags; tensors are appended. Raises Refused if a value cannot be kept."""
    try:
        return _ENCODER.encode(tagged.encode_value(value, tensors, path))
    except tagged.Unwritable as error:
        raise Refused(str(error)) from None


def _write_tensors(tensors: Sequence[torch.Tensor]) -> bytes:
    plain = memory.all_contiguous_values(tensors)
    header, _ = files.make_header([(str(i), str(t.dtype).removeprefix("torch."), tuple(t.shape)) for i, t in enumerate(plain)])
    return b"".join([header, *(memory.view(tensor) for tensor in plain)])


def _read_tensors(raw: bytes, joined: bool = False) -> list[torch.Tensor]:
    """`joined`: they may lie in one memory, which takes a fifth of the time where they are small. Raises ValueError."""
    data = 8 + files.header_length(raw[:8], len(raw))
    entries = files.read_header(raw[8:data], len(raw) - data)
    whole = bytearray(raw[data:]) if joined else memoryview(raw)[data:]
    tensors = []
    for index in range(len(entries)):
        entry = entries.get(str(index))
        if entry is None:
            raise ValueError(f"tensor {index} is missing")
        if joined and entry.end > entry.begin and entry.begin % entry.dtype.itemsize == 0:
            flat = torch.frombuffer(whole, dtype=entry.dtype, count=(entry.end - entry.begin) // entry.dtype.itemsize, offset=entry.begin)
            tensors.append(flat.view(entry.shape))
            continue
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        memory.view(tensor)[:] = whole[entry.begin : entry.end]
        tensors.append(tensor)
    return tensors


def buffer_form(tensor: torch.Tensor) -> Form:
    """Of one buffer."""
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def buffer_forms(model: torch.nn.Module) -> dict[str, Form | None]:
    """Of all buffers of a model, by name."""
    return {name: buffer_form(buffer) for name, buffer in packing.named_buffers(model)}


class BuiltBuffers:
    """The buffers that a model had when it was attached."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.forms: Forms = buffer_forms(model)
        self._unsaved = unsaved_buffers(model)

    def shared(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Buffers that are missing in `held` by their name, since they share the tensor of another one by now."""
        if not self.forms.keys() - held:
            return {}
        every = packing.named_buffers(self._model, remove_duplicate=False)
        return {name: tensor.detach() for name, tensor in every if name in self.forms and name not in held}

    def changed(self, held: Mapping[str, torch.Tensor], only: Collection[str] | None) -> dict[str, Form | None]:
        """Of those that have another form now, have gone or are new, the form of then; `only` of these, or of all."""
        names = {*self.forms, *held} if only is None else {*self.forms, *held}.intersection(only)
        now = {name: buffer_form(tensor) for name, tensor in held.items()}
        return {name: self.forms.get(name) for name in sorted(names) if self.forms.get(name) != now.get(name)}

    def unsaved(self, held: Mapping[str, torch.Tensor]) -> list[str]:
        """Those of `held` that the model's state_dict leaves out."""
        known = self._unsaved if held.keys() <= self.forms.keys() else unsaved_buffers(self._model)
        return sorted(known.intersection(held))


def are_forms(value: Any) -> bool:
    """Is this what `BuiltBuffers.changed` gives?"""
    return isinstance(value, dict) and all(
        each is None or (isinstance(each, list) and len(each) == 2 and isinstance(each[0], list) and isinstance(each[1], str))
        for each in value.values()
    )


def unsaved_buffers(model: torch.nn.Module) -> set[str]:
    """Names of the buffers that the model's state_dict leaves out (`persistent=False`)."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in getattr(module, "_non_persistent_buffers_set", ())
    }


def put_buffers(model: torch.nn.Module, values: Mapping[str, torch.Tensor | None], left_out: Collection[str] = ()) -> None:
    """Give buffers these values: in place if one has its form and can be written, else as another tensor. None: it was not there.

    Names that share a tensor continue sharing one. A buffer that the model does not have is added, with `left_out` from its state_dict.
    Raises Refused if the model has no such module.
    """
    every: dict[str, torch.Tensor | None] = dict(packing.named_buffers(model, remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, value in values.items():
        now = every.get(name)
        with torch.no_grad():
            if now is not None and value is not None and buffer_form(now) == buffer_form(value) and _copied(now, value):
                continue
            near = next((tensor for tensor in (now, *packing.tensors(model)) if tensor is not None), value)
            moved = None if value is None or near is None else value.to(near.device, copy=True)
        for each in [name] if now is None else [other for other, tensor in every.items() if tensor is now]:
            path, _, local = each.rpartition(".")
            _assign(modules.get(path), local, moved, each, name not in left_out)
            every[each] = moved


def _copied(now: torch.Tensor, value: torch.Tensor) -> bool:
    """Write in place, unless torch does not let anybody write into that tensor, such as an expanded one."""
    try:
        now.data.copy_(value)  # a graph that was made in this step may hold it, and checks its version
    except RuntimeError:
        return bool(torch.equal(now, value.to(now.device)))
    return True


def _assign(owner: torch.nn.Module | None, local: str, value: torch.Tensor | None, name: str, persistent: bool) -> None:
    if owner is None:
        if value is not None:
            path = name.rpartition(".")[0]
            raise Refused(f"buffer {name!r} is in the resume record, and the model has no module {path!r}; build the same model")
    elif local in owner._buffers:
        owner._buffers[local] = value
    elif value is not None:
        if hasattr(owner, local):
            delattr(owner, local)
        owner.register_buffer(local, value, persistent=persistent)


def generator_states() -> dict[str, Any]:
    """Their states now."""
    return Generators().states()


def check_generators(found: Mapping[str, Any]) -> None:
    """Raises ValueError for a state that numpy would not refuse: it reads at the place that the state names, also beyond its words."""
    told = found.get("numpy")
    if told is None or told["bit_generator"] != "MT19937":  # of another kind numpy looks itself
        return
    place, words = told["state"]["pos"], told["state"]["key"]
    if type(place) is not int or not 0 <= place <= WORDS or words.shape != (WORDS,):
        raise ValueError(f"a state of numpy's generator at place {str(place)[:20]}, expected 0 to {WORDS}")


def put_generators(found: Mapping[str, Any]) -> None:
    """Put back what `generator_states` gave."""
    if "python" in found:
        version, words, gauss = found["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
    if "numpy" in found:
        import numpy  # the script drew from it before

        numpy.random.set_state(found["numpy"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(found["cuda"][: torch.cuda.device_count()])
    if "torch" in found:
        torch.set_rng_state(found["torch"])


class Generators:
    """Asked at every step: what has not been drawn from since is not copied again."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._python: Any = None

    def states(self) -> dict[str, Any]:
        """Their states now: the very object that was returned last where nothing was drawn. It is not to be changed."""
        found, before = self._now(), self._found
        if found.keys() != before.keys() or not all(_same(one, before[name]) for name, one in found.items()):
            self._found = found
        return self._found

    def _now(self) -> dict[str, Any]:
        python = random.getstate()
        if self._python != python:
            self._python, (version, words, gauss) = python, python
            told: Any = (version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss)
        else:
            told = self._found["python"]
        found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": told}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            found["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found["cuda"] = torch.cuda.get_rng_state_all()
        return found


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(*pair) for pair in zip(one, other, strict=True))
    return bool(one.tobytes() == other.tobytes() if hasattr(one, "tobytes") else one == other)
