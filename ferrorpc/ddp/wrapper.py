"""What a module that was wrapped for data parallelism offers in either form, NumPy's and torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from ferrorpc.ddp.replica import Replica
from ferrorpc.ddp.steps import Steps


class Wrapper:
    """The part of DistributedDataParallel that does not ask when gradients are averaged."""

    _replica: Replica

    def broadcast_parameters(self, root: int = 0) -> None:
        """Gives every rank the weights (and buffers, where the module has them) of rank `root`, in place. Collective."""
        self._replica.share(root)

    def check_weights(self) -> None:
        """Compares the weights of all ranks, as hashes, through the coordinator. Collective.

        Raises:
            CollectiveMismatchError: they differ. It names the ranks that are not as most are, and the first parameter.
        """
        self._replica.compare("now")

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it gradients add up over several batches, and none is averaged. All ranks alike."""
        return self._replica.no_sync()

    def accumulate(self, count: int) -> Iterator[int]:
        """For a batch in `count` parts: `for part in ddp.accumulate(4)` goes through 0 to 3, and gradients are averaged with
        the last. They add up until then, so weigh each part's loss by its share. Counts may differ between ranks."""
        return self._replica.accumulate(count)

    def uneven(self, follow: Callable[[], Any] | None = None) -> AbstractContextManager[None]:
        """Within it ranks may have different numbers of steps: one that has left counts with weight 0.

        A rank waits at the end of the block until all have left it. Means are over the ranks that still take part. Buffers
        are not exchanged within; at the end all take those of the (lowest) rank with the most steps.

        Args:
            follow: called on a rank that has left, after each later step, with the means in `.grad`: what the loop does once
                gradients are averaged, such as `optimizer.step`, so that weights and optimizer stay the same on all ranks.
                Without it the weights, too, are taken from the rank with the most steps.
        """
        return self._replica.uneven(follow)

    @property
    def steps(self) -> Steps:
        """Where the time of this rank's last steps went: computing, exposed and hidden communication."""
        return self._replica.reducer.steps

    @property
    def sent_bytes(self) -> int:
        """Bytes that the busiest rank has sent for gradients so far."""
        return self._replica.reducer.traffic.sent_bytes
