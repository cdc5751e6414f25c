"""Start and supervise processes: ``rankwire run``, ``rankwire.local``, doctor, certificates.

``process`` is the one supervisor. May import all but ``rpc``, ``collectives`` and ``testing``; a
launched rank and its launcher share only the names of environment variables. ``import rankwire``
loads nothing of this, and only ``rankwire run`` and the doctor load rich.
"""
