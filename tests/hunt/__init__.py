"""Run the tests on a machine that has too much to do, and list those that fail: none may pass by the schedule's grace.

Beside them are four busy processes for each core. What the tests start, and the backends of their servers, is stopped
(SIGSTOP) for 0.05 to 2 s at moments drawn by lot. A test that fails here assumes something that does not always hold,
or it has found a fault.
"""
