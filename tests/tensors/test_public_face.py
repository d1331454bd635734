"""What `import psjob` offers: names that an editor and `help` find, with signatures and docstrings."""

from __future__ import annotations

import doctest
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
from unittest import mock

import pytest

import psjob as ps
from hack import pythonpage
from psjob import contract

CLIENT = ["AsyncClient", "AsyncJob", "Client", "Job", *pythonpage.client_exceptions()]
PUBLIC = [name for name in ps.__all__ if name not in ("__version__", *CLIENT)]


def test_dir_names_all_that_a_script_may_use_and_only_what_works() -> None:
    assert {name for name in dir(ps) if not name.startswith("__")} == {*PUBLIC, *CLIENT, "integrations"}
    assert [name for name in dir(ps) if not hasattr(ps, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        ps.atach  # type: ignore[attr-defined] # noqa: B018


def test_a_typo_is_told_from_its_near_name() -> None:
    done = subprocess.run([sys.executable, "-c", "import psjob; psjob.atach"], capture_output=True, text=True)
    assert done.stderr.endswith("AttributeError: module 'psjob' has no attribute 'atach'. Did you mean: 'attach'?\n")


def test_its_exceptions_are_those_that_are_raised() -> None:
    """By the names that a traceback shows, each of them can be caught."""
    for name in ("Refused", "PeerLost", *pythonpage.client_exceptions()):
        thing = getattr(ps, name)
        assert issubclass(thing, Exception) and (thing.__module__, thing.__qualname__) == ("psjob", name) and inspect.getdoc(thing)
        assert type(pickle.loads(pickle.dumps(thing("why")))) is thing  # noqa: S301
    subclasses = {kind for kind in ps.JobProblem.__subclasses__() if not kind.__module__.startswith("tests.")}
    assert {kind.__name__ for kind in subclasses} == set(pythonpage.client_exceptions()) - {"JobProblem"}


@pytest.mark.parametrize("name", PUBLIC)
def test_each_promises_and_shows_an_example_that_runs(name: str) -> None:
    thing = getattr(ps, name)
    text = inspect.getdoc(thing) or ""
    assert "\nExample:\n" in text
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return
    takes = inspect.signature(thing).parameters
    assert [one for one in takes if f"\n    {one}: " not in text] == []
    given = inspect.signature(thing).return_annotation
    assert inspect.isclass(thing) or given == "None" or "\nReturns:\n" in text


def test_each_is_on_the_page_of_reference() -> None:
    assert sorted(name for names in pythonpage.GROUPS.values() for name in names) == sorted(PUBLIC)


@pytest.mark.parametrize("name", ["shard", "checkpoint", "pipeline"])
def test_a_folder_of_the_same_name_does_not_take_its_place(name: str) -> None:
    __import__(f"psjob.{name}")
    thing = getattr(ps, name)
    assert inspect.isfunction(thing) and name in pydoc.render_doc(thing, renderer=pydoc.plaintext).splitlines()[0]
    assert inspect.ismodule(sys.modules[f"psjob.{name}"])


def test_help_of_psjob_is_one_screen_that_names_them() -> None:
    done = subprocess.run([sys.executable, "-c", "import psjob; help(psjob)"], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) <= 80
    assert [name for name in (*PUBLIC, *CLIENT, "integrations") if not re.search(rf"\b{name}\b", done.stdout)] == []


def test_help_of_a_name_is_its_own() -> None:
    text = pydoc.render_doc(ps.attach, renderer=pydoc.plaintext)
    assert "attach(model" in text and "Args:" in text
    for kind in (ps.Client, ps.Job):
        text = pydoc.render_doc(kind, renderer=pydoc.plaintext)
        assert "Methods defined here" in text and "inherited" not in text
    assert "AsyncJob" not in pydoc.render_doc(ps.Client, renderer=pydoc.plaintext)


def test_importing_psjob_does_not_import_torch() -> None:
    code = "import sys, psjob; assert 'torch' not in sys.modules; dir(psjob); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0


def test_the_client_is_found_where_it_is_installed_and_named_where_it_is_not() -> None:
    assert set(CLIENT) <= set(dir(ps))
    program = "import sys; sys.modules['psjob_client'] = None; import psjob; {}"
    for code in ("psjob.Client", "from psjob import Client"):
        done = subprocess.run([sys.executable, "-c", program.format(code)], capture_output=True, text=True)
        last = done.stderr.strip().splitlines()[-1]
        assert last == "ImportError: psjob.Client is in the distribution psjob-client, which is not installed: " + contract.INSTALL
    code = program.format("psjob.Refused; assert not {'Client', 'Job', 'JobProblem'} & {*dir(psjob), *psjob.__all__}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_psjob_imports_no_client() -> None:
    code = "import sys, psjob; dir(psjob); assert 'psjob_client' not in sys.modules and 'psjob_operator' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


VERBS = [(kind, name) for kind in (ps.Client, ps.Job) for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_"]


@pytest.mark.parametrize(("kind", "name"), VERBS)
def test_each_verb_of_the_client_promises_and_shows_an_example(kind: type, name: str) -> None:
    verb = getattr(kind, name)
    text = inspect.getdoc(verb) or ""
    takes = [parameter for parameter in inspect.signature(verb).parameters if parameter != "self"]
    assert name == "close" or "Example:" in text
    assert "Raises:" in text or name == "close"
    assert not takes or "Args:" in text
    assert [parameter for parameter in takes if f"    {parameter}: " not in text] == []
    assert kind is ps.Client or ("client." not in text and "As for" not in text)


WITHOUT_AWAIT = ((ps.Client, ps.AsyncClient, {"place"}), (ps.Job, ps.AsyncJob, set[str]()))


@pytest.mark.parametrize(("blocking", "other", "own"), WITHOUT_AWAIT)
def test_the_blocking_face_has_every_verb_of_the_other(blocking: type, other: type, own: set[str]) -> None:
    verbs = {name for name in dir(other) if not name.startswith("_")} - own
    assert verbs == {name for name in dir(blocking) if not name.startswith("_")} - {"id"}
    for name in verbs - {"phase", "manifest"}:
        theirs, ours = (inspect.signature(getattr(kind, name)).parameters for kind in (other, blocking))
        assert {key: ours[key] for key in theirs} == dict(theirs), name


@pytest.mark.parametrize(("kind", "name"), [verb for verb in VERBS if verb != (ps.Job, "wait")])
def test_a_blocking_verb_hands_on_all_that_it_takes(kind: type, name: str) -> None:
    core = mock.create_autospec(ps.AsyncClient if kind is ps.Client else ps.AsyncJob, instance=True, id="digits")
    given = {parameter: object() for parameter in inspect.signature(getattr(kind, name)).parameters if parameter != "self"}
    getattr(kind(core), name)(**given)
    getattr(core, name).assert_called_once_with(**given)
