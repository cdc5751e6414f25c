"""Start and supervise processes: ``rankwire run``, ``rankwire.local``, doctor, certificates.

May import all but ``rpc``, ``collectives`` and ``testing``. A launched rank and its launcher share
only names of environment variables. Not loaded by ``import rankwire``.
"""
