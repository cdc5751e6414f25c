"""A search over 300 settings: one of them fails, one worker dies, and the others finish the work.

    rankwire run -n 4 --on-failure continue examples/search.py

Rank 0 gives each setting of a ridge regression to some worker, and keeps the best. Training one
twice does no harm (`idempotent=True`), so what the dead worker had goes to the others.
"""

import os
import signal
from itertools import product

import numpy as np

import rankwire

PENALTIES = np.geomspace(1e-4, 1e2, 30)
DEGREES = range(10)
DOOMED = 2  # the rank that dies


def validation_error(setting: tuple[float, int]) -> float:
    """Fit a polynomial with a penalty; return the error on points that it has not seen."""
    penalty, degree = setting
    if degree == 0 and penalty == PENALTIES[0]:
        raise ValueError(f"degree {degree} with penalty {penalty:g} is not a model")
    random = np.random.default_rng(7)
    x = random.uniform(-1, 1, 4000)
    y = np.sin(4 * x) + random.normal(scale=0.3, size=x.size)
    powers = np.vander(x, degree + 1)
    seen, unseen = slice(0, 40), slice(40, None)
    normal = powers[seen].T @ powers[seen] + penalty * np.eye(degree + 1)
    weights = np.linalg.solve(normal, powers[seen].T @ y[seen])
    return float(np.mean((powers[unseen] @ weights - y[unseen]) ** 2))


def main() -> None:
    with rankwire.connect() as backend, rankwire.RpcAgent(backend) as agent:
        if backend.world_size < 4:
            raise SystemExit("run with -n 4 or more: one rank searches, and one of the others dies")
        agent.register(validation_error, idempotent=True)
        agent.register("die", lambda: os.kill(os.getpid(), signal.SIGKILL))
        backend.barrier()
        if backend.rank > 0:
            agent.serve()
            return
        found = []
        for outcome in agent.map(validation_error, product(PENALTIES, DEGREES)):
            if isinstance(outcome.error, rankwire.RemoteError):  # a ValueError too
                print(f"failed: {outcome.error.remote_message}")
            else:
                found.append((outcome.value, outcome.task, outcome.rank))
            if outcome.index == 100:
                agent.rpc_async(DOOMED, "die").exception()
        error, (penalty, degree), _ = min(found)
        ranks = sorted({rank for *_, rank in found if rank is not None})
        print(f"{len(found)} settings tried by ranks {ranks}")
        print(f"best: degree {degree}, penalty {penalty:.2g}, error {error:.3f}")
        agent.stop()


if __name__ == "__main__":
    main()
