"""What a script is told that changes weights of a job by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from psjob.api.byhand import ByHand, Change

if TYPE_CHECKING:
    from psjob.api.attached import AttachedJob


class WeightGuard:
    """Of an attached job. Where the workers step by themselves, or weights land while the script runs, it looks until the first step."""

    def __init__(self, job: AttachedJob) -> None:
        self._job = job
        self._weights = ByHand(job.parameters, lambda row: job.session.exchange.sharing.shows(row, job.parameters[row]))

    def joined(self) -> None:
        """The model holds the job's weights for the first time."""
        self._weights.remember()

    def stepped(self) -> None:
        """The shards have answered a step."""
        if self._job.overlap is None:
            self._weights.remember()

    def forget(self) -> None:
        """The weights are the script's."""
        self._weights.forget()

    def refuse_before_step(self) -> None:
        """The next step would undo what was changed."""
        if not self._job.steps_alone and (found := self._change()) is not None:
            self._job.refuse(
                f"parameter {found[0]} was changed by hand after step {self._job.session.clock} ({found[1].seen}), and the shards hold "
                "the weights. Change them before attach or under a parametrization, put them back before a step, or set "
                "training.updateAt: worker"
            )
        self._weights.forget()

    def refuse_without_step(self) -> None:
        """The script trains in another way than by the attached optimizer."""
        if self._job.made == 0 and (found := self._change()) is not None:
            self._job.refuse(
                f"parameter {found[0]} was changed by hand ({found[1].seen}), and no step of the attached optimizer was made. "
                "Train with optimizer.step() of the one that was given to attach"
            )

    def leave(self) -> bool:
        """The job ends with the weights of the last step; has the script left them in the model?"""
        self.refuse_without_step()
        found = None if self._job.steps_alone else self._change()
        if found is not None:
            print(
                f"psjob: parameter {found[0]} was changed by hand after the last step ({found[1].seen}); final.safetensors holds the "
                "weights of that step. Keep others by torch.save",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        self._weights.forget()
        return found is None

    def once(self, name: str, loss: Any) -> Callable[[], Any]:
        """A closure for the optimizer's own step: `loss` is what the script's gave at the weights with which the step begins."""
        self._weights.remember()
        asked = False

        def again() -> Any:
            nonlocal asked
            if asked or self._weights.change() is not None:
                self._job.refuse(
                    f"{name} evaluates its closure at other weights inside its step, whose gradients a job does not "
                    "average. Move the weights in the script, put them back, and step torch's optimizer"
                )
            asked = True
            return loss

        return again

    def _change(self) -> tuple[str, Change] | None:
        """What the script has written into a parameter since, after its name."""
        change = self._weights.change()
        if change is None:
            return None
        self._job.carry_out(self._job.session.check)  # the shards may have begun anew
        return self._job.session.layout.table[change.row].name, change
