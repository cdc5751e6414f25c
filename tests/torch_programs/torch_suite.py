"""torch's own tests of ``torch.distributed``, on rankwire in place of Gloo.

    BACKEND=gloo WORLD_SIZE=4 TEMP_DIR=/tmp/somewhere python -m unittest torch_suite.Suite.test_...

torch's tests ask for the backend by its name and decide by it what to test. They are told that it
is Gloo, and every group that they make of it is one of rankwire's. The ranks of a test are forked
from this process, which has loaded everything: that takes a tenth of the time of new ones.
"""

import functools

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import distributed_test as theirs

import rankwire.torch  # noqa: F401  (registers the backend)


def _in_place_of_gloo(make):
    @functools.wraps(make)
    def made(*args, **kwargs):
        args = ["rankwire" if value == "gloo" else value for value in args]
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = "rankwire"
        return make(*args, **kwargs)

    return made


dist.init_process_group = _in_place_of_gloo(dist.init_process_group)
dist.new_group = _in_place_of_gloo(dist.new_group)
common_distributed.TIMEOUT_DEFAULT = 60


class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    """All tests of torch for backends."""

    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


SUITES = (Suite,)
