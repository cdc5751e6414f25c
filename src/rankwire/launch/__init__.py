"""How the processes of a job start, and how each finds its place in the world.

``run`` starts the ranks of one host; ``environment`` reads, in each rank, what the launcher left
for it. They share only the names of the environment variables. Importing this package loads
neither rich nor typer.
"""
