"""How the processes of a job start. Only the command line imports this package.

``run`` starts the ranks of one host; ``backends.connect`` reads, in each rank, what the launcher
left for it. They share only the names of the environment variables. Importing this package loads
neither rich nor typer.
"""
