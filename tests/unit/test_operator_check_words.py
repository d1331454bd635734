"""`psjob-operator check` where the API server does not give what was asked for: the sentence names the right next step."""

from __future__ import annotations

import pytest

from psjob_operator.cluster.client import ApiError
from psjob_operator.cluster.health import answer_words


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ApiError(403, "Forbidden", "no list"), "refuses: 403 Forbidden: no list; give the operator the rights"),
        (ApiError(401, "Unauthorized", "who?"), "rbac.create"),
        (ApiError(0, "Connection", "nobody there"), "cannot be asked: Connection: nobody there; look at the kubeconfig"),
        (ApiError(503, "ServiceUnavailable", "later"), "does not answer as expected: 503 ServiceUnavailable: later; read its log"),
    ],
)
def test_each_kind_of_failure_has_its_next_step(error: ApiError, says: str) -> None:
    assert says in answer_words(error)
