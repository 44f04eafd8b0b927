"""The doctor and the alerts beside a node of real processes: broken in every way one after the other, and healthy.

`python -m tests.doctor.soak`, or `make doctor-soak`.
"""
