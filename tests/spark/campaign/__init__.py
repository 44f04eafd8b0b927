"""The campaign of Spark: writers of each kind run on and on while what they need is killed; nothing is lost or doubled.

`__main__` (options, verdict), `lanes` (what each writer does, in a process of its own), `stage` (the server, the
processes and their input), `kinds` (what goes wrong).
"""
