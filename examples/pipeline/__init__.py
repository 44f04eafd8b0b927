"""`python -m examples.pipeline`: real flights through Spark into the outbox, and out of the inbox into Parquet.

`flights` reads the CSV with Spark, `run` sends, delivers and drains it while parts are killed, `truth` reads the CSV
again and compares, `__main__` shows it.
"""
