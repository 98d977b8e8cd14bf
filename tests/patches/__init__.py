"""Tests of the patches."""
