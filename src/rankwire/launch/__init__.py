"""Start and supervise the processes of a job. Only the command line imports this package.

``run`` starts the ranks of one host. In each rank ``backends.connect`` reads what the launcher set;
the two share only the names of environment variables. Importing this package loads neither rich nor
typer.
"""
