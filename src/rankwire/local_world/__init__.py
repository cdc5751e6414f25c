"""Worlds that a running Python starts itself: from a notebook cell, a script or a test.

Ranks are processes (``rank_process`` at the starter, ``rank_program`` in the process) or threads of
a simulated world (``rank_thread``); ``handle`` is the user's view. Functions are pickled by value
(``function_pickle``) over a private pipe. Nothing here reads from the network.
"""
