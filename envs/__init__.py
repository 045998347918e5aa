"""Environments shared by the scripts. Nothing in here imports torch or a script."""
