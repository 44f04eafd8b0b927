"""`mailroom demo`: 336,776 flights go through Mailroom to four workers that follow each aircraft.

`source` reads the flights, `tables` makes the tables, `sending` commits flights and messages together, `worker` is the
consumer, `processes` runs it and the dispatcher, `run` kills some of them midway, `results` asks the tables whether
every flight arrived once and in order, `cli` shows it.

Installed, this package is `mailroom._flights`, so its modules import each other by relative names.
"""
