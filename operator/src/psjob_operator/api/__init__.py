"""The manifest: models of spec and status, validation and the CRD."""

from psjob_operator.api.spec import JobSpec, PSTrainingJob
from psjob_operator.api.status import JobStatus

__all__ = ["PSTrainingJob", "JobSpec", "JobStatus"]
