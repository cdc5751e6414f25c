"""Worlds that a running Python starts by itself: from a notebook's cell, a script, or a test.

Its ranks are processes (``rank_process`` is the starter's end, ``rank_program`` theirs) or threads
of a simulated world (``rank_thread``); ``handle`` is what users see of it. Functions travel to
processes by value (``parcels``), over a pipe that the starter made and nobody else can reach.
Nothing that comes from the network passes here.
"""
