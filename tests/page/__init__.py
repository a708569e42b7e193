"""Tests of the page that sums a run up, opened in a real Chromium."""
