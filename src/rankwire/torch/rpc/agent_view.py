"""What programs and tests ask of torch's agent: who the workers are, and numbers to look at."""

from __future__ import annotations

from rankwire.torch.rpc.session import Session, current
from rankwire.torch.rpc.workers import WorkerInfo


class AgentView:
    """This process's agent, as torch shows its own.

    Args:
        session: What it is a view of.
    """

    is_static_group = True

    def __init__(self, session: Session) -> None:
        self._session = session

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Return the worker of a name or rank, or this one."""
        session = self._session
        return session.me if worker is None else session.workers[session.rank_of(worker)]

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return all workers, in the order of their ranks."""
        return list(self._session.workers)

    def get_debug_info(self) -> dict[str, str]:
        """Return numbers by torch's names, as texts."""
        activity = self._session.agent.activity()
        return {
            "agent.thread_pool_size": str(self._session.threads),
            "agent.num_pending_requests": str(activity.in_flight),
            "agent.client_active_calls": str(activity.in_flight),
            "agent.server_active_calls": str(activity.in_service),
        }


def current_agent() -> AgentView:
    """Return a view of this process's agent.

    Raises:
        RuntimeError: RPC is not initialized.
    """
    return AgentView(current())


def rref_debug_info() -> dict[str, str]:
    """Return how many objects others hold, and what is under way, by torch's names."""
    session = current()
    objects, handles = session.owned.count()
    return {
        "num_owner_rrefs": str(objects),
        "num_forks": str(handles),
        "num_pending_futures": str(session.agent.activity().in_flight),
        "num_pending_users": "0" if session.news.is_quiet else "1",
    }
