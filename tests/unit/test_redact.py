"""What a process says of its end is cut, and loses what looks like a credential, before it reaches a status.

- What is shown of an error: the script's lines and torch's, and psjob's only if the error is psjob's own.
- Whose code it is: the script's, or a package's, wherever pip, the system or PYTHONPATH has put that.
- How a process leaves with a sentence.
"""

from __future__ import annotations

import importlib.util
import json
import re
import site
import string
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from re._parser import SubPattern
from re._parser import parse as parse_pattern
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from psjob import contract
from psjob.process import errors
from psjob.process.errors import Refused, leave_message
from psjob_operator.cluster.cache import JobStore
from psjob_operator.cluster.pods import parse_pod
from psjob_operator.cluster.redact import _BY_FORM, _BY_NAME, CHARACTERS, LINES, READ, REMOVED, encoded_forms, last_log_words, scrub, tail
from psjob_operator.plan.process_outcome import of_the_runtime, outcome_of
from tests.support.soaking import rotating
from tests.unit.cluster_pods import entry, pod

MADE = "Zx9" * 20
JWT = f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx{MADE}.{MADE}"
HEX = "0123456789abcdef0123456789abcdef01234567"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{MADE}\n{MADE}\n-----END RSA PRIVATE KEY-----"
PGP = f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{MADE}\n{MADE}\n-----END PGP PRIVATE KEY BLOCK-----"
DIGITS = HEX[:32] * 2
SECRETS = {
    # how it stands in a log: the part that must not be told
    "DB_PASSWORD=hunter2": "hunter2",
    "export PASSWD='hunter 2'": "hunter 2",
    'password: "hun\\"ter2"': 'ter2"',
    "passphrase = hunter2,x": "hunter2,x",
    "{'token': 'abc def'}": "abc def",
    '{"client_secret":"abc def"}': "abc def",
    r"{\"api_key\": \"abc\"}": "abc",
    "api-key=>abc": "abc",
    "APIKEY:abc": "abc",
    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfi": "wJalr",
    "AKIAIOSFODNN7EXAMPLE": "AKIAIOSFODNN7EXAMPLE",
    "Authorization: Bearer abc.def": "abc.def",
    "authorization: Basic dXNlcjpwYXNz": "dXNl",
    "curl -H 'Bearer abcdefghijkl'": "abcdefghijkl",
    "train.py --hub-token abc --epochs 3": "abc",
    "train.py --password=abc": "abc",
    "postgres://user:pa%40ss@db:5432/x": "pa%40ss",
    "https://user:p@ss@host/x": "p@ss",
    "machine api.wandb.ai login user password abc": "abc",
    "https://x.blob.example/c?sv=1&sig=abc%3D&x=1": "abc",
    "https://s3.example/x?X-Amz-Signature=abc": "abc",
    f"wandb: ERROR API key {HEX} is not valid": HEX,
    f"see {JWT}": JWT,
    f"see {JWT[:30]}": JWT[:30],
    PEM: MADE,
    PEM.partition("\n")[2]: MADE,
    PEM[:80]: PEM[40:80],
    f"ghp_{MADE}": MADE,
    f"github_pat_{MADE}": MADE,
    f"hf_{MADE}": MADE,
    f"xoxb-1-{MADE}": MADE,
    f"AIza{MADE}": MADE,
    f"sk-ant-api03-{MADE}": MADE,
    **{f"say {begin}{secret} now": secret for begin, secret in (
        ("ASIA", "IOSFODNN7EXAMPLE"), ("ABIA", "IOSFODNN7EXAMPLE"), ("ghs_", MADE), ("ghu_", MADE), ("gho_", MADE),
        ("ghr_", MADE), ("glpat-", MADE), ("glrt-", MADE), ("gldt-", MADE), ("glptt-", MADE), ("glsoat-", MADE), ("npm_", MADE),
        ("pypi-AgEI", MADE), ("xoxp-1-", MADE), ("xapp-1-", MADE), ("sk-proj-", MADE), ("sk-svcacct-", MADE), ("sk-admin-", MADE),
        ("sk-or-v1-", HEX * 2), ("api_org_", MADE), ("nvapi-", MADE), ("r8_", MADE), ("gsk_", MADE), ("xai-", MADE), ("pplx-", MADE),
        ("dapi", HEX[:32]), ("dckr_pat_", MADE), ("glsa_", MADE), ("GOCSPX-", MADE), ("SG.", f"{MADE}.{MADE}"), ("shpat_", HEX),
        ("lin_api_", MADE), ("PMAK-", f"{HEX}-{HEX}"), ("tskey-auth-", MADE), ("AGE-SECRET-KEY-1", "QZ2" * 20), ("ya29.", MADE),
        ("hvs.", MADE), ("sk_live_", MADE), ("dop_v1_", HEX), ("hf_", MADE), ("sbp_", HEX), ("figd_", MADE), ("NRAK-", "AB1" * 9))},
    "DB_PASS=hunter2": "hunter2",
    "dbPass: hunter2": "hunter2",
    "MYSQL_PWD=hunter2": "hunter2",
    "Server=db;Uid=sa;Pwd=hunter2;": "hunter2",
    "Server=db;Uid=sa;PWD=/unter2;": "/unter2",
    "mount.sh --db-pass=hunter2": "hunter2",
    "mount.sh --db-pass hunter2 -v": "hunter2",
    "pass: hunter2": "hunter2",
    "pass=2hunters": "2hunters",
    "pass=123456": "123456",
    '{"user":"me","pass":"12"}': '12"',
    "?user=me&pass=hunter2&x=1": "hunter2",
    '{"password"   :   "hunter2"}': "hunter2",
    '{"pin_token" : 1234}': "1234",
    "Password : hunter2": "hunter2",
    "password =            hunter2": "hunter2",
    "password: !!str hunter2": "hunter2",
    "password:\n  hunter2": "hunter2",
    "password: |\n  hunter 2": "hunter 2",
    "password: >-\r\n  hunter 2\r": "hunter 2",
    '"db-pwd":\n    "hunter 2"': "hunter 2",
    "machine api.wandb.ai\n  login user\n  password hunter2": "hunter2",
    "machine api.wandb.ai\n  password hunter2\n  login user": "hunter2",
    "default\n\tlogin user\n\taccount x\n\tpassword hunter2": "hunter2",
    'machine x login user password "hunter 2"': '2"',
    "<password>hunter2</password>": "hunter2",
    '<ns:dbPwd type="text">hunter\n2</ns:dbPwd>': "2</",
    "<password>hunter2": "hunter2",
    "<api_key><![CDATA[hunter2]]></api_key>": "hunter2",
    PGP: MADE,
    PGP.partition("\n")[2]: MADE,
    PGP[:90]: PGP[45:90],
    f"PRIVATE_KEY={PEM[:80]}": PEM[40:80],
    f"private_key: |\n  {PEM[:80]}": PEM[40:80],
    "AWS Secret Access Key [None]: wJalrXUtnFEMI/K7MDENG": "wJalr",
    "Password [****]: hunter2": "hunter2",
    "API key: hunter2": "hunter2",
    f"posting to https://hooks.slack.com/services/T0/B0/{MADE}": MADE,
    '"auths": {"registry.example": {"auth": "dXNlcjpwYXNz"}}': "dXNlcjpwYXNz",
    r"{\"auth\":\"dXNlcjpwYXNzdw==\"}": "dXNlcjpwYXNzdw",
    f"sk_live_{MADE}": MADE,
    f"rk_live_{MADE}": MADE,
    f"glrt-{MADE}": MADE,
    f"glrt-t1_{MADE}.01.{MADE}": MADE,
    f"hvs.{MADE}": MADE,
    f"dop_v1_{HEX}": HEX,
    f"worker {DIGITS}": DIGITS,
    f"workers {DIGITS}": DIGITS,
    f"shard {DIGITS}": DIGITS,
    f"shards {DIGITS}": DIGITS,
    f"questions {DIGITS}": DIGITS,
    f'"workers.inner": "{DIGITS}{DIGITS}"': DIGITS,
}  # fmt: skip
PLAIN = (
    "ValueError: shapes differ: (3, 4) and (4, 3)",
    "KeyError: 'token'",
    "num_tokens=512 tokens: 1024 tokenizer: gpt2",
    "password authentication failed for user x",
    f"at commit {HEX}",
    "https://host:8080/path and ssh to node-1",
    'MountVolume.SetUp failed for volume "psjob-secret" : secret "a-key-1" not found',
    "exit code 1: CUDA out of memory. Tried to allocate 2.00 GiB",
    "risk-adjusted-return-of-the-portfolio",
    "pass 3 of 5, pass: 3 of 5, pass 2/5: loss 0.3, pass=12, pass: 99.5% pass: 3/5",
    'pass: True, "pass": 3, {"pass":3,"fail":2} test_pass=0.5 DB_PASS=None --pass 3',
    "passed: 12 passes=3 passing: all pass_rate: high passthrough=auto passenger: none",
    "pass@1: 0.8 pass@10=0.95 pass^3: high",
    "bypass: on bypass=auto --bypass cache by-pass: auto compass=north encompass: all",
    "forward pass: fused, backward_pass=recompute second pass: resumed lowpass=butter band-pass: off forwardPass",
    "--- PASS: TestShard (0.01s)",
    "PWD=/home/me/job and {'OLDPWD': '/home/me', 'PWD': '/home/me/job'}",
    "<pad_token> a <mask_token> b\nc <b>d</b> <eos_token> e</s>",
    "got <unk_token> instead\nstopped here",
    "volumes:\n- secret:\n    name: keys\n  imagePullSecrets:\n    - name: here",
    'proxy says "auth": "required", "auth": "ldap"',
    "glove-wiki-gigaword-300 task_live_0123456789abcdef hvs. sk_live dop_v1_",
    f"worker 3 of 8 has {DIGITS}, shards: 4, sha256:{DIGITS}, worker sha256:{DIGITS}",
    "login to the machine of worker 3\nstep 4",
)


@pytest.mark.parametrize(("text", "secret"), SECRETS.items(), ids=range(len(SECRETS)))
def test_what_looks_like_a_credential_is_removed(text: str, secret: str) -> None:
    said = tail(f"step 3\n{text}\nstopped here")
    assert secret in text and secret not in said and REMOVED in said
    assert said.endswith("\nstopped here") or "PRIVATE KEY" in text  # of a key without an end nothing is left


@pytest.mark.parametrize("text", PLAIN)
def test_what_helps_is_left(text: str) -> None:
    assert tail(text) == text


def test_words_of_the_kubelet_are_judged_by_form_alone() -> None:
    text = "failed to fetch anonymous token: unexpected status 401 from https://me:pw@registry.example/v2"
    assert encoded_forms(text) == f"failed to fetch anonymous token: unexpected status 401 from https://{REMOVED}@registry.example/v2"


def test_the_last_lines_are_kept_and_half_a_line_is_not() -> None:
    lines = [f"line {number} " + "x" * 10 for number in range(5000)]
    assert tail("\n".join(lines)) == "\n".join(lines[-LINES:])
    long = [f"line {number} " + "x" * 400 for number in range(50)]
    said = tail("\n".join(long))
    assert len(said) <= CHARACTERS and said.endswith(long[-1]) and not set(said.split()) - {word for line in long for word in line.split()}
    assert tail("password=" + "x" * READ) == REMOVED


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [*SECRETS, *PLAIN, REMOVED, "token", "secret:", "bearer ", "://", "@", "key ", "eyJ", "\n", '"', "\\", "-", "'", "="]
        ),
        st.text(alphabet=string.printable, max_size=40),
        st.sampled_from(["a", "0f", "://", "eyJ", "key", "- ", "\\", "token="]).map(lambda part: part * 400),
    ),
    max_size=12,
).map("".join)


@settings(max_examples=40)
@given(TEXTS)
@example("0f" * 400 + "://" * 400 + next(line for line in PLAIN if line.startswith("forward pass: fused")))
def test_a_tail_is_bounded_and_to_cut_it_again_changes_nothing(text: str) -> None:
    said = tail(text)
    assert len(said) <= CHARACTERS and len(said.splitlines()) <= LINES
    assert tail(said) == said


HOSTILE = (
    *("a", "token", "token: ", "eyJ-", "://", "://a@", "-----BEGIN ", "key ", "login a ", "--a-", '\\"', "secret\\\\", "xoxb-", " ", "a."),
    *("pass", "--pass ", "pass: 1", "pwd", "OLDPWD", "token   ", "token: |\n ", "token:\n -", "secret [", "<token ", "<token>", "<a:token"),
    *("machine a\n", "login\n", '"auth":"', "hooks.slack.com/services", "-----END PGP PRIVATE KEY", "worker 0", "sk_live_", "hvs."),
)


@pytest.mark.parametrize(("part", "size"), [*((part, 16 * 1024) for part in HOSTILE), *(rotating(part, 200_000) for part in HOSTILE)])
def test_no_text_takes_long(part: str, size: int) -> None:
    def seconds(size: int) -> float:
        text, began = (part * size)[:size], time.process_time()
        scrub(text)
        return time.process_time() - began

    short, long = (min(seconds(size) for _ in range(2)) for size in (size // 8, size))
    assert long < 30 * short + 0.01, "of eight times the text a linear rule takes 8 times as long, a quadratic one 64 times"


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in (*_BY_FORM, *_BY_NAME)], ids=range(len(_BY_FORM) + len(_BY_NAME)))
def test_no_rule_repeats_without_end_what_repeats(pattern: re.Pattern[str]) -> None:
    """What needs steps without a bound for one beginning: an open repeat inside of any repeat."""

    def opened(part: Any, inside: bool) -> bool:
        if isinstance(part, tuple) and len(part) == 2 and str(part[0]) in ("MAX_REPEAT", "MIN_REPEAT"):
            _, most, body = part[1]
            return (inside and most > 1000) or opened(body, inside or most > 1)
        return isinstance(part, tuple | list | SubPattern) and any(opened(inner, inside) for inner in part)

    assert opened(parse_pattern("(?:a+b)+"), False) and not opened(parse_pattern("(?:a?b)+a*"), False)
    # Each part of a URL's user begins with an `@`, which is in no other: there is one way to read it.
    assert not opened(parse_pattern(pattern.pattern, pattern.flags & ~re.UNICODE), False) or pattern.pattern.startswith("(://)")


def exit_of(message: str, tails: bool = True, code: int = 1) -> tuple[str, str]:
    """What is told of a worker that left `message`: its fate's words, and the message that is kept."""
    ended = entry("worker", terminated={"exitCode": code, "reason": "Error", "message": message})
    found = parse_pod(pod(phase="Failed", containerStatuses=[ended]), tails)
    assert found is not None and found.process.exit is not None
    return outcome_of(found.process).message, found.process.exit.message


def test_a_failure_is_told_without_its_credentials_or_by_its_code_alone() -> None:
    words, _ = exit_of("Traceback\nLoginError: https://me:pw@host refused, token=abc\n")
    assert words == f"exit code 1: LoginError: https://{REMOVED}@host refused, token={REMOVED}"
    assert exit_of("Traceback\nLoginError: no\n", tails=False) == ("exit code 1", "")


def test_json_that_the_planner_reads_stays_json() -> None:
    said = json.dumps({"error": 'refused: "password": "abc"', "fenced": {"term": 7}})
    kept = json.loads(last_log_words(said)[0])
    assert "abc" not in kept["error"] and kept["fenced"] == {"term": 7}
    assert json.loads(last_log_words(said, tails=False)[0]) == {"error": "", "fenced": {"term": 7}}
    fields = {
        "password": "abc",
        "n": {"auth": "dXNlcjpwYXNz", "api_key": "a b", "token_accuracy": 0.5, "token": None, "hf_" + MADE: 1},
        "error": "no",
    }
    kept = json.loads(last_log_words(json.dumps(fields))[0])
    inner = {"auth": REMOVED, "api_key": REMOVED, "token_accuracy": 0.5, "token": None, REMOVED: 1}
    assert kept == {"password": REMOVED, "n": inner, "error": "no"}
    assert last_log_words('{"error": "a"}\n')[0].endswith("\n") and last_log_words("{not json")[0] == "{not json"
    assert last_log_words("[" * 5000)[0] == tail("[" * 5000)


def test_without_tails_the_runtimes_exit_codes_mean_what_they_did() -> None:
    ended = entry("worker", terminated={"exitCode": 77, "message": '{"error": "add psjob.attach"}'})
    store = JobStore(tails=False)
    raw = pod(phase="Failed", containerStatuses=[ended])
    found = parse_pod(raw, store.tails)
    assert found is not None and found.process.exit is not None and of_the_runtime(found.process.exit)
    assert (outcome_of(found.process).kind, outcome_of(found.process).cause, outcome_of(found.process).message) == ("fatal", "Refused", "")


SCRIPT, LOADER = "/home/me/train.py", "/venv/torch/utils/data/dataloader.py"
API, INNER = f"{errors.HERE}api/data.py", f"{errors.HERE}worker/connection.py"


def chain(*files: str, last: str) -> Callable[[], Any]:
    """Calls a function of each file in turn; that of the last one runs `last`."""
    call: Any = None
    for number, file in reversed(list(enumerate(files))):
        body = last if call is None else "return then()"
        names: dict[str, Any] = {"then": call, "Refused": Refused}
        exec(compile(f"def at_{number}():\n {body}", file, "exec"), names)  # noqa: S102
        call = names[f"at_{number}"]
    return call  # type: ignore[no-any-return]


def files_of(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)][1:]


@pytest.mark.parametrize(
    ("files", "last", "left"),
    [
        ([SCRIPT, API, LOADER, INNER, SCRIPT], "{}['no']", [SCRIPT, LOADER, SCRIPT]),
        ([SCRIPT, API, LOADER], "raise RuntimeError('of one size')", [SCRIPT, LOADER]),
        ([SCRIPT, API], "raise ValueError('takes a word')", [SCRIPT]),
        ([SCRIPT, INNER, API], "raise Refused('no')", [SCRIPT]),
        ([SCRIPT, API], "1 / 0", [SCRIPT, API]),
        ([SCRIPT, API, INNER], "raise ValueError('not in shape')", [SCRIPT, API, INNER]),
        ([SCRIPT, API], "raise AssertionError", [SCRIPT, API]),
        ([SCRIPT, API, SCRIPT, API], "1 / 0", [SCRIPT, SCRIPT, API]),
    ],
)
def test_lines_that_are_shown(files: list[str], last: str, left: list[str]) -> None:
    with pytest.raises(Exception) as caught:
        chain(*files, last=last)()
    errors.shorten(caught.value)
    assert files_of(caught.value) == left


def test_errors_that_led_to_it_are_shown_so_too() -> None:
    with pytest.raises(KeyError) as caught:
        try:
            chain(SCRIPT, API, last="raise ValueError('takes a word')")()
        except ValueError:
            chain(SCRIPT, API, SCRIPT, last="{}['no']")()
    errors.shorten(caught.value)
    assert caught.value.__context__ is not None and files_of(caught.value.__context__) == [SCRIPT]
    assert files_of(caught.value) == [SCRIPT, SCRIPT]


def test_the_text_of_a_loader_process_is_shown_so_too() -> None:
    text = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        f'  File "{LOADER}", line 1, in fetch\n    data = self.dataset[3]\n           ^^^^^^^^^\n'
        f'  File "{API}", line 2, in __getitem__\n    return self.theirs[3]\n           ^^^^^^^^^\n'
        f'  File "{SCRIPT}", line 3, in __getitem__\n    return {{}}["no"]\nKeyError: no'
    )
    error = RuntimeError(text)
    errors.shorten(error)
    assert errors.HERE not in str(error)
    assert str(error).endswith(f'File "{SCRIPT}", line 3, in __getitem__\n    return {{}}["no"]\nKeyError: no')
    assert "dataset[3]" in str(error) and "theirs" not in str(error)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a script that has begun there."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(folder / "train.py")))
    return folder


def places(torch: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Those found where torch lies in this folder."""
    spec = SimpleNamespace(origin=str(torch / "torch" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return errors.package_folders.__wrapped__()


def test_all_places_of_packages(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = places(tmp_path / "third-party", monkeypatch)
    for place in (sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages(), tmp_path / "third-party"):
        assert f"{place}/" in found
    assert not str(script / "train.py").startswith(found)


def test_a_folder_of_pythonpath_that_pip_has_filled(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / "packages", tmp_path / "own", script):
        (folder / "tqdm-4.0.dist-info").mkdir(parents=True)
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    (tmp_path / "own" / "tqdm-4.0.dist-info").rmdir()
    found = places(tmp_path / "third-party", monkeypatch)
    assert f"{tmp_path}/packages/" in found and f"{tmp_path}/own/" not in found and f"{script}/" not in found


def test_torch_in_the_folder_of_the_script(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = places(script, monkeypatch)
    assert str(script / "torch" / "utils" / "data.py").startswith(found)
    assert not str(script / "train.py").startswith(found)


def test_torch_in_a_folder_above_the_script(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = places(tmp_path, monkeypatch)
    assert not str(script / "train.py").startswith(found)


def test_a_shorter_message_replaces_a_longer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "end"
    monkeypatch.setenv(contract.ENV_TERMINATION_LOG, str(path))
    for body in ({"problem": "x" * 500}, {"problem": "y"}):
        leave_message(body)
        assert json.loads(path.read_text()) == body
    assert path.stat().st_size == len(json.dumps(body))
