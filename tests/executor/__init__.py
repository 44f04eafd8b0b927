"""Tests of executables."""
