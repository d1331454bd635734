"""What a process says of its end is cut, and loses what looks like a credential, before it reaches a status."""

from __future__ import annotations

import json
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob_operator.cluster.pods import parse
from psjob_operator.cluster.scrub import CHARACTERS, LINES, READ, REMOVED, forms, scrub, tail, told
from psjob_operator.cluster.store import JobStore
from psjob_operator.plan.fate import fate, of_the_runtime
from tests.unit.test_cluster_pods import entry, pod

MADE = "Zx9" * 20
JWT = f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx{MADE}.{MADE}"
HEX = "0123456789abcdef0123456789abcdef01234567"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{MADE}\n{MADE}\n-----END RSA PRIVATE KEY-----"
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
}
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
    assert forms(text) == f"failed to fetch anonymous token: unexpected status 401 from https://{REMOVED}@registry.example/v2"


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


@given(TEXTS)
def test_a_tail_is_bounded_and_to_cut_it_again_changes_nothing(text: str) -> None:
    said = tail(text)
    assert len(said) <= CHARACTERS and len(said.splitlines()) <= LINES
    assert tail(said) == said


@pytest.mark.parametrize(
    "part", ["a", "token", "token: ", "eyJ-", "://", "://a@", "-----BEGIN ", "key ", "login a ", "--a-", '\\"', "secret\\\\", "xoxb-"]
)
def test_no_text_takes_long(part: str) -> None:
    def seconds(size: int) -> float:
        text, began = (part * size)[:size], time.process_time()
        scrub(text)
        return time.process_time() - began

    assert min(seconds(200_000) for _ in range(2)) < 2.0, "a rule that is quadratic takes minutes for it"


def exit_of(message: str, tails: bool = True, code: int = 1) -> tuple[str, str]:
    """What is told of a worker that left `message`: its fate's words, and the message that is kept."""
    ended = entry("worker", terminated={"exitCode": code, "reason": "Error", "message": message})
    found = parse(pod(phase="Failed", containerStatuses=[ended]), tails)
    assert found is not None and found.process.exit is not None
    return fate(found.process).message, found.process.exit.message


def test_a_failure_is_told_without_its_credentials_or_by_its_code_alone() -> None:
    words, _ = exit_of("Traceback\nLoginError: https://me:pw@host refused, token=abc\n")
    assert words == f"exit code 1: LoginError: https://{REMOVED}@host refused, token={REMOVED}"
    assert exit_of("Traceback\nLoginError: no\n", tails=False) == ("exit code 1", "")


def test_json_that_the_planner_reads_stays_json() -> None:
    said = json.dumps({"error": 'refused: "password": "abc"', "fenced": {"view": 7}})
    kept = json.loads(told(said)[0])
    assert "abc" not in kept["error"] and kept["fenced"] == {"view": 7}
    assert json.loads(told(said, tails=False)[0]) == {"error": "", "fenced": {"view": 7}}
    assert told('{"error": "a"}\n')[0].endswith("\n") and told("{not json")[0] == "{not json"
    assert told("[" * 5000)[0] == tail("[" * 5000)


def test_without_tails_the_runtimes_exit_codes_mean_what_they_did() -> None:
    ended = entry("worker", terminated={"exitCode": 77, "message": '{"error": "add psjob.attach"}'})
    store = JobStore(tails=False)
    raw = pod(phase="Failed", containerStatuses=[ended])
    found = parse(raw, store.tails)
    assert found is not None and found.process.exit is not None and of_the_runtime(found.process.exit)
    assert (fate(found.process).kind, fate(found.process).cause, fate(found.process).message) == ("fatal", "Refused", "")
