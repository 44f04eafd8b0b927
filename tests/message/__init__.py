"""Tests of messages, their columns, values, headers and topics."""
