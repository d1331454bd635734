"""A question to a shard's status port, proven with the run's key for questions (see `contract.KEYS`)."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from typing import Any

from psjob import contract
from psjob.contract import keys


def ask_shard(host: str, port: int, questions: bytes, path: str = contract.STATUS_PATH, seconds: float = 2.0) -> dict[str, Any]:
    """What the shard answers.

    Raises:
        OSError: it is out of reach, refuses, or is not of the run that `questions` belongs to.
        ValueError: the answer is no JSON object.
    """
    with closing(http.client.HTTPConnection(host, port, timeout=seconds)) as connection:
        try:
            connection.request("GET", contract.CHALLENGE_PATH)
            nonce = str(_object(connection.getresponse().read(contract.STATUS_BYTES)).get("nonce"))
            connection.request("GET", path, headers={contract.PROOF_HEADER: f"{nonce} {keys.question(questions, nonce, path)}"})
            answer = connection.getresponse()
            body = answer.read(contract.STATUS_BYTES)
        except http.client.HTTPException as error:
            raise OSError(f"{host}:{port}{path} answers what is no HTTP: {type(error).__name__}") from None
    if answer.status != 200:
        raise OSError(f"{host}:{port}{path} answers {answer.status}")
    if not keys.same(answer.headers.get(contract.ANSWER_HEADER, ""), keys.answer(questions, nonce, path, body)):
        raise OSError(f"{host}:{port}{path}: the process that answers does not have the key of this run")
    return _object(body)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        told = json.loads(raw)
    except RecursionError:
        raise ValueError("an answer nested too deep") from None
    if not isinstance(told, dict):
        raise ValueError(f"an answer is a {type(told).__name__}, expected an object")
    return told
