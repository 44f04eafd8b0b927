"""Tests of watched tables."""
