"""What `import psjob` offers: names that an editor and `help` find, with signatures and docstrings."""

from __future__ import annotations

import doctest
import inspect
import pydoc
import subprocess
import sys

import pytest

import psjob as ps
from hack import pythonpage

PUBLIC = [name for name in ps.__all__ if name != "__version__"]


def test_dir_names_all_that_a_script_may_use() -> None:
    assert {name for name in dir(ps) if not name.startswith("__")} == {*PUBLIC, "Client", "AsyncClient", "integrations"}
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        ps.atach  # type: ignore[attr-defined] # noqa: B018


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


def test_help_of_psjob_lists_them() -> None:
    text = pydoc.render_doc(ps, renderer=pydoc.plaintext)
    assert [name for name in PUBLIC if name not in text] == []
    assert "attach(model" in text


def test_importing_psjob_does_not_import_torch() -> None:
    code = "import sys, psjob; assert 'torch' not in sys.modules; dir(psjob); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0


def test_the_client_is_found_where_it_is_installed_and_named_where_it_is_not() -> None:
    assert {"Client", "AsyncClient"} <= set(dir(ps)) and "Client" not in ps.__all__
    for code in ("psjob.Client", "from psjob import Client"):
        program = f"import sys, psjob; sys.modules['psjob_client'] = None; {code}"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        last = done.stderr.strip().splitlines()[-1]
        assert last == "ImportError: psjob.Client is in the distribution psjob-client, which is not installed: pip install 'psjob[client]'"
    done = subprocess.run([sys.executable, "-c", "import sys, psjob; assert 'psjob_client' not in sys.modules"], capture_output=True)
    assert done.returncode == 0, "importing psjob imports no client"


VERBS = [name for name, value in vars(ps.Client).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_of_the_client_promises_and_shows_an_example(name: str) -> None:
    verb = getattr(ps.Client, name)
    text = inspect.getdoc(verb) or ""
    takes = [parameter for parameter in inspect.signature(verb).parameters if parameter != "self"]
    assert name == "close" or "Example:" in text
    assert "Raises:" in text or name == "close"
    assert not takes or "Args:" in text
    assert [parameter for parameter in takes if f"    {parameter}: " not in text] == []


def test_the_blocking_client_and_job_have_every_verb_of_the_other() -> None:
    from psjob_client.sdk.blocking import Job
    from psjob_client.sdk.handle import AsyncJob

    for blocking, other in ((ps.Client, ps.AsyncClient), (Job, AsyncJob)):
        verbs = {name for name in dir(other) if not name.startswith("_")} - {"place"}
        assert verbs <= set(dir(blocking))
