"""A question to a shard's status port, proven with the run's key for questions (see `contract.KEYS`)."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from typing import Any

from psjob import contract
from psjob.contract import keys


def ask(host: str, port: int, questions: bytes, path: str = contract.STATUS_PATH, seconds: float = 2.0) -> dict[str, Any]:
    """What the shard answers.

    Raises:
        OSError: it is out of reach, refuses, or is not of the run that `questions` belongs to.
        ValueError: the answer is no JSON.
    """
    with closing(http.client.HTTPConnection(host, port, timeout=seconds)) as connection:
        connection.request("GET", contract.CHALLENGE_PATH)
        nonce = str(json.loads(connection.getresponse().read(contract.STATUS_BYTES)).get("nonce"))
        connection.request("GET", path, headers={contract.PROOF_HEADER: f"{nonce} {keys.question(questions, nonce, path)}"})
        answer = connection.getresponse()
        body = answer.read(contract.STATUS_BYTES)
    if answer.status != 200:
        raise OSError(f"{host}:{port}{path} answers {answer.status}")
    if not keys.same(answer.headers.get(contract.ANSWER_HEADER, ""), keys.answer(questions, nonce, path, body)):
        raise OSError(f"{host}:{port}{path}: who answers does not have the key of this run")
    told: dict[str, Any] = json.loads(body)
    return told
